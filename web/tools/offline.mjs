// offline.mjs: after the build, the list of all files with the hashes of their contents goes into sw.js, so that the
// service worker knows what to keep and changes whenever any file does.
import { createHash } from "node:crypto";
import { readdir, readFile, writeFile } from "node:fs/promises";
import { join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";

const PLACE = "const FILES = {};";

export function offline() {
  return {
    name: "offline",
    hooks: {
      "astro:build:done": async ({ dir }) => {
        const root = fileURLToPath(dir);
        const worker = join(root, "sw.js");
        const files = {};
        for (const entry of await readdir(root, { recursive: true, withFileTypes: true })) {
          if (!entry.isFile() || entry.name === "sw.js" || entry.name.endsWith(".map")) continue;
          const file = join(entry.parentPath, entry.name);
          const digest = createHash("sha256").update(await readFile(file)).digest("hex");
          files[relative(root, file).split(sep).join("/")] = digest.slice(0, 16);
        }
        const sorted = Object.fromEntries(Object.entries(files).sort());
        const text = await readFile(worker, "utf8");
        if (!text.includes(PLACE)) throw new Error(`sw.js has no line "${PLACE}"`);
        await writeFile(worker, text.replace(PLACE, `const FILES = ${JSON.stringify(sorted)};`));
      },
    },
  };
}

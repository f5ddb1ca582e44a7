// relative.mjs: after the build, addresses in the pages that begin at the host's root begin at the site's root
// instead (each page says where that is, <base>), so that the site also works below a path.
import { readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const ROOTED = /((?:src|href|component-url|renderer-url|before-hydration-url)=")\/(?!\/)/g;

export function relativeAddresses() {
  return {
    name: "relative-addresses",
    hooks: {
      "astro:build:done": async ({ dir }) => {
        const root = fileURLToPath(dir);
        for (const name of await readdir(root, { recursive: true })) {
          if (!name.endsWith(".html")) continue;
          const file = join(root, name);
          await writeFile(file, (await readFile(file, "utf8")).replace(ROOTED, "$1./"));
        }
      },
    },
  };
}

// strip.ts: node strip.ts FOLDER: the runtime and the tests' files as JavaScript, under the same names,
// so that a browser loads them from any server without a bundler.
import { globSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { stripTypeScriptTypes } from "node:module";
import { dirname, join } from "node:path";

const [folder = ""] = process.argv.slice(2);
for (const path of globSync(["src/runtime/*.ts", "src/checks/*.ts", "test/*.ts"])) {
  const target = join(folder, path);
  mkdirSync(dirname(target), { recursive: true });
  writeFileSync(target, stripTypeScriptTypes(readFileSync(path, "utf8")));
}

import { configDefaults, defineConfig } from "vitest/config";

// Tests that need an adapter run by themselves: WEBGPU=1, with Dawn's variables (tests/web.py).
const gpu = process.env["WEBGPU"] === "1" ? [] : ["test/webgpu*.test.ts"];

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    exclude: [...configDefaults.exclude, ...gpu],
    testTimeout: 60_000,
    maxWorkers: 1,
    isolate: false,
  },
});

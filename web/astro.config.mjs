// astro.config.mjs: the site as static files that work on any host and below any path.
import svelte from "@astrojs/svelte";
import { defineConfig } from "astro/config";
import { offline } from "./tools/offline.mjs";
import { relativeAddresses } from "./tools/relative.mjs";

export default defineConfig({
  output: "static",
  trailingSlash: "always",
  devToolbar: { enabled: false },
  build: { format: "directory", inlineStylesheets: "never" },
  integrations: [svelte(), relativeAddresses(), offline()],
  vite: {
    build: { target: "es2024" },
    worker: { format: "es" },
    experimental: { renderBuiltUrl: () => ({ relative: true }) },
  },
});

// astro.config.mjs: the site as static files that work on any host and below any path.
import svelte from "@astrojs/svelte";
import { defineConfig } from "astro/config";
import { offline } from "./tools/offline.mjs";
import { relativeAddresses } from "./tools/relative.mjs";

export default defineConfig({
  output: "static",
  trailingSlash: "always",
  devToolbar: { enabled: false },
  // Threads in WebAssembly; the servers of the built site send the same.
  server: { headers: { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" } },
  build: { format: "directory", inlineStylesheets: "never" },
  integrations: [svelte(), relativeAddresses(), offline()],
  vite: {
    build: { target: "es2024" },
    worker: { format: "es" },
    experimental: { renderBuiltUrl: () => ({ relative: true }) },
  },
});

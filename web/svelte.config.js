import { vitePreprocess } from "@astrojs/svelte";

export default { preprocess: vitePreprocess({ script: false }), compilerOptions: { runes: true } };

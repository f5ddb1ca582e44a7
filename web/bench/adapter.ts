// adapter.ts: node adapter.ts: the adapter that Dawn gives, as JSON.
import { describeAdapter } from "../src/runtime/webgpu.ts";
import { dawn } from "../test/webgpu_dawn.ts";

console.log(JSON.stringify(await describeAdapter({ gpu: dawn() })));
process.exit(0); // Dawn keeps the process otherwise

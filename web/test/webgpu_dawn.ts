// webgpu_dawn.ts: WebGPU in node: Dawn, from npm's package "webgpu", or from the file that DAWN names.
import { createRequire } from "node:module";

interface Dawn {
  create(options: string[]): GPU;
}

let gpu: GPU | undefined;

/** The same one every time; `toggles` as Dawn names them count in the first call. */
export function dawn(toggles: string[] = []): GPU {
  const { platform, arch } = process;
  const folder = platform === "darwin" ? "darwin-universal" : `${platform}-${arch}`;
  const file = process.env["DAWN"] ?? `webgpu/dist/${folder}/dawn.node`;
  gpu ??= (createRequire(import.meta.url)(file) as Dawn).create(toggles);
  return gpu;
}

/** Lets go of it, so that node can end. */
export function dropDawn(): void {
  gpu = undefined;
}

// features.ts: what this browser or node offers to WebAssembly, found by trying.

export interface Features {
  readonly simd: boolean;
  /** Shared memory between workers: a browser gives it to isolated pages, and only workers may wait for it. */
  readonly threads: boolean;
  /** 64-bit memory: more than 4 GiB. */
  readonly memory64: boolean;
}

const HEADER = [0, 0x61, 0x73, 0x6d, 1, 0, 0, 0];
// (func (result v128) i32.const 0 i8x16.splat)
const SIMD = [...HEADER, 1, 5, 1, 0x60, 0, 1, 0x7b, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 0xfd, 15, 11];
// (memory 1 1 shared) (func i32.const 0 i32.atomic.load drop)
const ATOMICS = [
  ...HEADER, 1, 4, 1, 0x60, 0, 0, 3, 2, 1, 0, 5, 4, 1, 3, 1, 1, 10, 11, 1, 9, 0, 65, 0, 0xfe, 16, 2, 0, 26, 11,
];
// (memory i64 1)
const MEMORY64 = [...HEADER, 5, 3, 1, 4, 1];

/** Whether there is WebAssembly at all: a setting or a lockdown mode may have taken it. */
export const hasWasm = (): boolean => typeof WebAssembly !== "undefined";

const valid = (bytes: number[]): boolean => hasWasm() && WebAssembly.validate(new Uint8Array(bytes));

export function probeFeatures(): Features {
  const isolated = (globalThis as { crossOriginIsolated?: boolean }).crossOriginIsolated !== false;
  const mayWait = typeof document === "undefined";
  return {
    simd: valid(SIMD),
    threads: typeof SharedArrayBuffer !== "undefined" && isolated && mayWait && valid(ATOMICS),
    memory64: valid(MEMORY64),
  };
}

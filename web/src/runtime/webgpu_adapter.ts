// webgpu_adapter.ts: which GPU there is, in words, and whether the kernels can run on it.
//
// What a page says before it opens an engine: every way in which there is no GPU has its own sentence.
// Read next: webgpu_device.ts.
import { EngineError } from "./engine.ts";

/** What every WebGPU adapter offers, by the standard, and the kernels need. */
const NEEDED = {
  maxStorageBuffersPerShaderStage: 8,
  maxStorageBufferBindingSize: 2 ** 27,
  maxBufferSize: 2 ** 28,
  maxComputeWorkgroupStorageSize: 16_384,
  maxComputeInvocationsPerWorkgroup: 256,
  maxComputeWorkgroupSizeX: 256,
} as const;

/** Limits that a device is asked for, as large as the adapter has them. */
type Limit = keyof typeof NEEDED;
const LIMITS = Object.keys(NEEDED) as Limit[];

/** Features that are used where they are there. */
const WANTED = ["subgroups", "timestamp-query"] as const satisfies readonly GPUFeatureName[];

const PATIENCE_MS = 5_000;
const SOFTWARE = /swiftshader|llvmpipe|lavapipe|basic render/i;

export interface AdapterReport {
  /** Whether the kernels run on it. */
  readonly usable: boolean;
  /** Why not, and what to do. */
  readonly reason: string;
  readonly vendor: string;
  readonly architecture: string;
  readonly device: string;
  readonly description: string;
  /** A program on the processor: right, but slow. */
  readonly software: boolean;
  readonly features: readonly string[];
  readonly limits: Readonly<Record<string, number>>;
}

export interface AdapterOptions {
  /** In place of navigator.gpu. */
  readonly gpu?: GPU | undefined;
  /** Milliseconds that an adapter may take to answer. */
  readonly patience?: number;
}

/** Why there is no GPU to compute on; the message says what to do as well, for who has no choice to show. */
class NoGpu extends EngineError {
  readonly reason: string;

  constructor(reason: string, hint = "use WebAssembly") {
    super(`${reason}: ${hint}`);
    this.reason = reason;
  }
}

/** The best adapter's description, or why there is none; never throws and never waits for long. */
export async function describeAdapter(options: AdapterOptions = {}): Promise<AdapterReport> {
  try {
    return reportOf(await findAdapter(options));
  } catch (error) {
    const reason = error instanceof NoGpu ? error.reason : error instanceof Error ? error.message : String(error);
    return { ...NOTHING, reason };
  }
}

const NOTHING = {
  usable: false, vendor: "", architecture: "", device: "", description: "", software: false, features: [], limits: {},
} as const;

/** The adapter that the browser gives. Throws an EngineError that says why there is none. */
export async function findAdapter(options: AdapterOptions = {}): Promise<GPUAdapter> {
  const gpu = options.gpu ?? (globalThis.navigator as Navigator | undefined)?.gpu;
  if (!gpu) {
    const insecure = (globalThis as { isSecureContext?: boolean }).isSecureContext === false;
    throw insecure
      ? new EngineError("browsers give WebGPU to https and localhost only: open the page at such an address")
      : new NoGpu("this browser has no WebGPU", "update it, or use WebAssembly");
  }
  let timer: ReturnType<typeof setTimeout> | undefined;
  const patience = options.patience ?? PATIENCE_MS;
  const late = new Promise<never>((_, refuse) => {
    timer = setTimeout(() => refuse(new NoGpu(`no GPU answered within ${patience / 1000} s`)), patience);
  });
  try {
    const adapter = await Promise.race([gpu.requestAdapter({ powerPreference: "high-performance" }), late]);
    if (adapter === null) {
      throw new NoGpu("WebGPU is there but gives no adapter (there is no GPU, or the browser blocks its driver)");
    }
    return adapter;
  } finally {
    clearTimeout(timer);
  }
}

/** An adapter in words. */
export function reportOf(adapter: GPUAdapter): AdapterReport {
  const { vendor, architecture, device, description } = adapter.info;
  const limits: Record<string, number> = {};
  for (const name of LIMITS) limits[name] = adapter.limits[name];
  const short = LIMITS.find((name) => !((limits[name] ?? 0) >= NEEDED[name]));
  const names = `${vendor} ${architecture} ${device} ${description}`;
  const report = {
    vendor, architecture, device, description, limits,
    software: fallback(adapter) || SOFTWARE.test(names),
    features: [...adapter.features].sort(),
  };
  const reason =
    short === undefined ? "" : `the adapter ${nameOf(report)} allows ${limits[short]} for ${short}, and the kernels need ${NEEDED[short]}`;
  return { ...report, usable: short === undefined, reason };
}

/** What to call an adapter. */
export function nameOf(report: Pick<AdapterReport, "vendor" | "architecture" | "device" | "description">): string {
  return report.description || [report.vendor, report.architecture].filter(Boolean).join(" ") || report.device || "GPU";
}

/** The attribute has moved from the adapter to its info. */
function fallback(adapter: GPUAdapter): boolean {
  const old = (adapter as { isFallbackAdapter?: boolean }).isFallbackAdapter;
  return adapter.info.isFallbackAdapter ?? old ?? false;
}

/** A device with the limits that its adapter has. Throws an EngineError when the adapter refuses. */
export async function requestDevice(adapter: GPUAdapter): Promise<GPUDevice> {
  const report = reportOf(adapter);
  if (!report.usable) throw new NoGpu(report.reason);
  try {
    return await adapter.requestDevice({
      requiredFeatures: WANTED.filter((name) => adapter.features.has(name)),
      requiredLimits: { ...report.limits },
    });
  } catch (error) {
    throw new EngineError(`the adapter ${nameOf(report)} gives no device: ${error instanceof Error ? error.message : error}`);
  }
}

// plotting.ts: uPlot, loaded when a curve is drawn.
import type uPlot from "uplot";

/**
 * Load uPlot. It asks for number formats in the browser's language as soon as it is loaded, and ends there with a RangeError
 * where the language is none: WebKitGTK says "C" on a machine without a locale.
 */
export async function loadPlot(): Promise<typeof uPlot> {
  if (!isLanguage(navigator.language)) Object.defineProperty(navigator, "language", { value: "en-US", configurable: true });
  return (await import("uplot")).default;
}

function isLanguage(name: string): boolean {
  try {
    new Intl.NumberFormat(name);
    return true;
  } catch {
    return false;
  }
}

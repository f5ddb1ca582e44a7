// plotting.ts: uPlot, loaded when a curve is drawn, and the axes that all charts have.
import type uPlot from "uplot";
import type { Colours } from "./colours.ts";

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

const FONT = "12px ui-sans-serif, system-ui, sans-serif";
const DIGIT = 7; // pixels, at most, in that font
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power));

/** 1.75, 20, 25K: short, so that an axis needs little room. */
const tick = (value: number | null): string =>
  value === null ? "" : value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 });

/** The axes of a chart of losses: whole numbers below, nats at the side; `grid` where nothing else guides the eye. */
export function axesOf({ soft, line, axis }: Colours, below: string, grid: boolean): uPlot.Axis[] {
  const both = { stroke: soft, font: FONT, labelFont: FONT, ticks: { stroke: axis, size: 5 } };
  return [
    { ...both, grid: { show: false }, label: below, labelSize: 18, size: 30, incrs: WHOLE },
    {
      ...both,
      grid: { show: grid, stroke: line, width: 1 },
      label: "loss, in nats",
      labelSize: 18,
      size: (_, values) => 16 + DIGIT * Math.max(1, ...(values ?? []).map((value) => value.length)),
      values: (_, ticks) => ticks.map(tick),
    },
  ];
}

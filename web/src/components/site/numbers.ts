// numbers.ts: numbers as a person reads them.

export const count = (value: number): string => Math.round(value).toLocaleString("en-US");

/** 838,400 as "838,400", 9,608,704 as "9.6 million". */
export function many(value: number): string {
  if (value < 1e6) return count(value);
  const [unit, name] = value < 1e9 ? [1e6, "million"] : [1e9, "billion"];
  return `${(value / unit).toLocaleString("en-US", { maximumFractionDigits: 1 })} ${name}`;
}

/** "48 s", "1 min 40 s", "9 min", "2 h 5 min". */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "unknown";
  const s = Math.max(0, Math.round(seconds));
  if (s < 100) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 5 && s % 60) return `${minutes} min ${s % 60} s`;
  if (minutes < 100) return `${Math.round(s / 60)} min`;
  const hours = Math.floor(minutes / 60);
  return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
}

/** A duration that nobody knows exactly: "about 50 s", "about 1 min", "about 7 h 30 min". */
export function roughly(seconds: number): string {
  if (seconds < 10) return "a few seconds";
  const step = seconds < 57 ? 5 : seconds < 600 ? 30 : seconds < 6000 ? 60 : 1800;
  const near = Math.round(seconds / step) * step;
  return `about ${near === 60 ? "1 min" : duration(near)}`;
}

export function speed(perSecond: number): string {
  return perSecond >= 100 ? count(perSecond) : perSecond.toLocaleString("en-US", { maximumFractionDigits: 1 });
}

export const percent = (share: number): string => {
  const value = 100 * share;
  return value >= 99.5 && value < 100 ? "> 99 %" : value < 0.1 ? "< 0.1 %" : `${value.toLocaleString("en-US", value < 10 ? { minimumFractionDigits: 1, maximumFractionDigits: 1 } : { maximumFractionDigits: 0 })} %`;
};

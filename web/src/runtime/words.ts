// words.ts: sentences and numbers as posttrainllm.json and the terminal write them.
//
// The sentences are Python's (training/writing.py, SENTENCES); here they get their values.

/** What a sentence may name. Texts are put in as they are. */
export type Values = Readonly<Record<string, number | string>>;

const FIELD = /\{(\w+)(?::(,?)(?:\.(\d)f)?)?\}/g;

/** A sentence with its values: {name}, and for numbers {name:,} {name:.3f} {name:,.1f} as in Python's str.format. */
export function fill(sentence: string, values: Values): string {
  return sentence.replace(FIELD, (field, name: string, comma: string | undefined, digits: string | undefined) => {
    const value = values[name];
    if (value === undefined) throw new RangeError(`"${sentence}" needs a value for ${field}`);
    if (typeof value === "string" || (!comma && !digits)) return String(value);
    return decimal(value, Number(digits ?? 0), comma === ",");
  });
}

/** A number with so many digits behind the point. */
function decimal(value: number, digits: number, grouped = false): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  return value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
    useGrouping: grouped,
    roundingMode: "halfEven",
  });
}

/** A positive number with two digits that count: 2.7, 0.012, 1,234. */
export function ratio(value: number): string {
  if (value >= 10) return decimal(value, 0, true);
  return decimal(value, value >= 1 || value <= 0 ? 1 : 1 - Math.floor(Math.log10(value)));
}

/** A size in powers of 1000: "1.2 GB". */
export function bytes(count: number): string {
  let size = count;
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (size < 999.5) return `${decimal(size, unit === "bytes" || size >= 99.95 ? 0 : 1)} ${unit}`;
    size /= 1000;
  }
  return `${decimal(size, 1, true)} TB`;
}

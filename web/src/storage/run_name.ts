// run_name.ts: names of runs that are plain folder names on every system (runs/folder.py, check_name).
import { show, StorageError } from "./errors.ts";

const DEVICES = /^(con|prn|aux|nul|com\d|lpt\d)(\..*)?$/i;

/** Throws a StorageError for a name that cannot be a folder everywhere. */
export function checkName(name: string, maxBytes: number): void {
  const bytes = new TextEncoder().encode(name).length;
  let problem = "";
  if (bytes < 1 || bytes > maxBytes) problem = `must have 1 to ${maxBytes} bytes, and has ${bytes}`;
  else if (/[/\\:*?"<>|\p{C}\p{Zl}\p{Zp}]/u.test(name)) {
    problem = 'must not hold path separators, control characters or any of : * ? " < > |';
  } else if (/^[.\-~ ]|[. ]$/.test(name)) {
    problem = "must not begin with a dot, dash, tilde or space, nor end with a dot or space";
  } else if (DEVICES.test(name)) problem = "is the name of a device on Windows";
  if (problem) throw new StorageError(`the run name ${show(name)} ${problem}`, "use letters, digits and dashes");
}

/** "small-001", or the next number that is free. */
export function nextName(base: string, taken: ReadonlySet<string>): string {
  const numbers = [...taken].map((name) => (name.startsWith(`${base}-`) ? /^\d+$/.exec(name.slice(base.length + 1)) : null));
  const highest = Math.max(0, ...numbers.map((match) => Number(match?.[0] ?? 0)));
  return `${base}-${String(highest + 1).padStart(3, "0")}`;
}

/** The name itself, or with the smallest number behind it that makes it free. */
export function freeName(name: string, taken: ReadonlySet<string>): string {
  for (let n = 1; ; n++) {
    const tried = n === 1 ? name : `${name}-${n}`;
    if (!taken.has(tried)) return tried;
  }
}

/** A name from a file made one that can be a folder. */
export function plainName(name: string, most: number): string {
  const plain = name.replace(/[/\\:*?"<>|\p{C}\p{Zl}\p{Zp}]/gu, "-").replace(/^[.\-~ ]+|[. ]+$/g, "").slice(0, 60) || "run";
  try {
    checkName(plain, most);
    return plain;
  } catch {
    return "run";
  }
}

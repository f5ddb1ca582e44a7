// sha256.ts: SHA-256 of content that comes in pieces, which the browser's own function cannot do.
//
// FIPS 180-4, section 6.2. The constants are the first 32 bits of the fractional parts of the square
// roots of the first 8 primes and of the cube roots of the first 64; they are computed from integers.
// Content that fits into one piece goes to crypto.subtle where there is one: it is several times faster.
import type { Bytes, Chunks } from "./files.ts";

const WHOLE = 64 << 20; // bytes gathered for crypto.subtle

function primes(count: number): number[] {
  const found: number[] = [];
  for (let n = 2; found.length < count; n++) if (found.every((prime) => n % prime)) found.push(n);
  return found;
}

/** The first 32 bits behind the point of the k-th root of n. */
function fraction(n: number, k: 2n | 3n): number {
  const wanted = BigInt(n) << (32n * k);
  let root = 0n;
  for (let bit = 1n << 40n; bit > 0n; bit >>= 1n) if ((root + bit) ** k <= wanted) root += bit;
  return Number(root & 0xffffffffn);
}

const START = primes(8).map((prime) => fraction(prime, 2n));
const ROUND = Int32Array.from(primes(64), (prime) => fraction(prime, 3n));

const turned = (x: number, by: number): number => (x >>> by) | (x << (32 - by));

export class Sha256 {
  readonly #state = Int32Array.from(START);
  readonly #words = new Int32Array(64);
  readonly #rest = new Uint8Array(64);
  #filled = 0;
  #bytes = 0;

  update(data: Uint8Array): this {
    this.#bytes += data.length;
    let at = 0;
    if (this.#filled > 0) {
      at = Math.min(64 - this.#filled, data.length);
      this.#rest.set(data.subarray(0, at), this.#filled);
      this.#filled += at;
      if (this.#filled < 64) return this;
      this.#block(this.#rest, 0);
      this.#filled = 0;
    }
    for (; at + 64 <= data.length; at += 64) this.#block(data, at);
    this.#rest.set(data.subarray(at));
    this.#filled = data.length - at;
    return this;
  }

  /** 64 hexadecimal digits; nothing can be added afterwards. */
  digest(): string {
    const bits = BigInt(this.#bytes) * 8n;
    const padding = new Uint8Array(((this.#filled < 56 ? 56 : 120) - this.#filled) + 8);
    padding[0] = 0x80;
    new DataView(padding.buffer).setBigUint64(padding.length - 8, bits);
    this.update(padding);
    return Array.from(this.#state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
  }

  #block(data: Uint8Array, at: number): void {
    const [w, s] = [this.#words, this.#state];
    for (let i = 0; i < 16; i++, at += 4) {
      w[i] = (data[at]! << 24) | (data[at + 1]! << 16) | (data[at + 2]! << 8) | data[at + 3]!;
    }
    for (let i = 16; i < 64; i++) {
      const [x, y] = [w[i - 15]!, w[i - 2]!];
      const small0 = turned(x, 7) ^ turned(x, 18) ^ (x >>> 3);
      const small1 = turned(y, 17) ^ turned(y, 19) ^ (y >>> 10);
      w[i] = (w[i - 16]! + small0 + w[i - 7]! + small1) | 0;
    }
    let a = s[0]!, b = s[1]!, c = s[2]!, d = s[3]!, e = s[4]!, f = s[5]!, g = s[6]!, h = s[7]!;
    for (let i = 0; i < 64; i++) {
      const big1 = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25);
      const one = (h + big1 + ((e & f) ^ (~e & g)) + ROUND[i]! + w[i]!) | 0;
      const big0 = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
      const two = (big0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + one) | 0;
      d = c; c = b; b = a; a = (one + two) | 0;
    }
    s[0] = s[0]! + a; s[1] = s[1]! + b; s[2] = s[2]! + c; s[3] = s[3]! + d;
    s[4] = s[4]! + e; s[5] = s[5]! + f; s[6] = s[6]! + g; s[7] = s[7]! + h;
  }
}

/** The hash and the size of content in pieces. */
export async function hashOf(content: Chunks): Promise<{ sha256: string; bytes: number }> {
  const subtle = (globalThis.crypto as Crypto | undefined)?.subtle;
  let waiting: Bytes[] | null = subtle === undefined ? null : [];
  const digest = new Sha256();
  let bytes = 0;
  for await (const piece of content) {
    bytes += piece.length;
    if (waiting !== null && bytes <= WHOLE) {
      waiting.push(piece);
      continue;
    }
    for (const earlier of waiting ?? []) digest.update(earlier);
    waiting = null;
    digest.update(piece);
  }
  if (waiting === null || subtle === undefined) return { sha256: digest.digest(), bytes };
  const whole = await new Blob(waiting).arrayBuffer();
  return { sha256: hex(new Uint8Array(await subtle.digest("SHA-256", whole))), bytes };
}

const hex = (bytes: Uint8Array): string => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

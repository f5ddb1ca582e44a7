// half.ts: float16 (IEEE 754 binary16) and back, bit for bit as numpy converts.
import { StorageError } from "./errors.ts";
import type { Bytes } from "./files.ts";

/** A float16's bits as a number. */
export function fromHalf(bits: number): number {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** float32 numbers as float16, little endian, rounded to the nearest, ties to even. Throws a StorageError for one that is too large. */
export function toHalf(values: Float32Array, what: string): Bytes {
  const words = new Uint16Array(values.length);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < values.length; i++) {
    const [word, size] = [bits[i]!, Math.abs(values[i]!)];
    const exponent = Math.max(-14, ((word >>> 23) & 255) - 127);
    const steps = evenly(size * 2 ** (10 - exponent)); // of the spacing that float16 has there
    const half = ((exponent + 14) << 10) + steps; // a carry goes into the exponent, as it should
    if (!(half < 0x7c00)) throw new StorageError(`${what} holds ${values[i]}, and the largest float16 is 65504`, "take float32");
    words[i] = ((word >>> 16) & 0x8000) | half;
  }
  return new Uint8Array(words.buffer);
}

/** The nearest whole number, the even one of two. */
function evenly(x: number): number {
  const below = Math.floor(x);
  const rest = x - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

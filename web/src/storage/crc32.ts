// crc32.ts: the check sum of zip archives: polynomial 0xEDB88320, reflected; eight tables, so that eight bytes go at once.

const TABLES = tables();

function tables(): Uint32Array[] {
  const first = Uint32Array.from({ length: 256 }, (_, n) => {
    let value = n;
    for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
    return value;
  });
  const all = [first];
  for (let k = 1; k < 8; k++) {
    const before = all[k - 1]!;
    all.push(Uint32Array.from(before, (value) => (value >>> 8) ^ first[value & 255]!));
  }
  return all;
}

/** The sum of more data behind data whose sum is known. */
export function crc32(data: Uint8Array, before = 0): number {
  const [t0, t1, t2, t3, t4, t5, t6, t7] = TABLES as [
    Uint32Array, Uint32Array, Uint32Array, Uint32Array, Uint32Array, Uint32Array, Uint32Array, Uint32Array,
  ];
  let crc = ~before;
  let at = 0;
  for (; at + 8 <= data.length; at += 8) {
    crc ^= data[at]! | (data[at + 1]! << 8) | (data[at + 2]! << 16) | (data[at + 3]! << 24);
    crc = t7[crc & 255]! ^ t6[(crc >>> 8) & 255]! ^ t5[(crc >>> 16) & 255]! ^ t4[crc >>> 24]!
      ^ t3[data[at + 4]!]! ^ t2[data[at + 5]!]! ^ t1[data[at + 6]!]! ^ t0[data[at + 7]!]!;
  }
  for (; at < data.length; at++) crc = (crc >>> 8) ^ t0[(crc ^ data[at]!) & 255]!;
  return ~crc >>> 0;
}

// call_table.ts: bound calls as the records of 256 bytes that kernels/cpp/run.cpp executes
// (kernels/cpp/call.h): op, then 10 byte offsets, 8 sizes, 8 attributes, little endian.
import type { BoundCall } from "./plan.ts";
import type { Tables } from "./tables.ts";

export const RECORD = 256;
const BUFFERS = 8;
const SIZES = BUFFERS + 10 * 8;
const ATTRS = SIZES + 8 * 8;
/** The offset of an optional operand that was left out. */
const ABSENT = 2n ** 64n - 1n;

/** `offsets`: of every region, in bytes. */
export function callTable(tables: Tables, calls: readonly BoundCall[], offsets: ReadonlyMap<string, number>): Uint8Array {
  const numbers = new Map(tables.ops.map((op, index) => [op.name, index]));
  const table = new Uint8Array(calls.length * RECORD);
  const view = new DataView(table.buffer);
  calls.forEach((call, index) => {
    const at = index * RECORD;
    view.setUint32(at, numbers.get(call.op) ?? tables.ops.length, true);
    call.operands.forEach((place, k) => {
      const offset = place === null ? ABSENT : BigInt((offsets.get(place.region) ?? 0) + 4 * place.offset);
      view.setBigUint64(at + BUFFERS + 8 * k, offset, true);
    });
    call.sizes.forEach((size, k) => view.setBigInt64(at + SIZES + 8 * k, BigInt(size), true));
    call.attrs.forEach((value, k) => view.setFloat64(at + ATTRS + 8 * k, value, true));
  });
  return table;
}

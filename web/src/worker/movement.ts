// movement.ts: how far one step moves each layer, looked at now and then.
import type { Tensors } from "../runtime/engine.ts";
import type { Statistics } from "../runtime/statistics.ts";
import type { Movement } from "./protocol.ts";

const LAYER = /^h\.(\d+)\./;

/** "h.3.mlp.c_fc.weight" belongs to layer 4; what stands outside of the layers is the tables and the end. */
function layerOf(name: string): string {
  const found = LAYER.exec(name);
  if (found !== null) return `layer ${Number(found[1]) + 1}`;
  return name.startsWith("w") ? "tables" : "end";
}

export function movementOf(statistics: Statistics, step: number, after: Tensors, before: Tensors): Movement {
  const layers = new Map<string, [Float32Array, Float32Array][]>();
  for (const [name, values] of after) {
    const was = before.get(name);
    const layer = layerOf(name);
    if (was !== undefined) layers.set(layer, [...(layers.get(layer) ?? []), [values, was]]);
  }
  return { step, layers: [...layers].map(([name, tensors]) => ({ name, ratio: statistics.movement(tensors) })) };
}

// parameters.ts: the parameters of a model by name, with their shapes, from the programs that Python wrote.
import { bindShape, instances, programSet } from "../runtime/program.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { StorageError } from "./errors.ts";
import { formsOf } from "./forms.ts";

export type Shapes = ReadonlyMap<string, readonly number[]>;

/** {parameter name: shape}, in the order of the model. Throws a StorageError for a size that nothing here can hold. */
export function parameterShapes(tables: Tables, settings: Settings): Shapes {
  const { programs, dims } = programSet(tables, settings, "inference");
  const [name = ""] = Object.keys(programs);
  const [program, sizes] = [programs[name], dims[name]];
  const shapes = new Map<string, readonly number[]>();
  if (program === undefined || sizes === undefined) return shapes;
  for (const buffer of instances(program, sizes["L"] ?? 0).values()) {
    if (buffer.role === "param") shapes.set(buffer.name, bindShape(buffer.shape, sizes));
  }
  return shapes;
}

export const count = (shape: readonly number[]): number => shape.reduce((all, n) => all * n, 1);

/** How many numbers all parameters have together. */
export const parameters = (shapes: Shapes): number => [...shapes.values()].reduce((sum, shape) => sum + count(shape), 0);

/** The name under which GPT2LMHeadModel stores a parameter. */
export function storedName(tables: Tables, name: string): string {
  const { prefix, head } = formsOf(tables).tensors;
  return name === head ? name : prefix + name;
}

/** Tensors whose names or sizes are not those of the model. Throws a StorageError. */
export function checkTensors(shapes: Shapes, tensors: ReadonlyMap<string, Float32Array>, what: string): void {
  for (const name of new Set([...shapes.keys(), ...tensors.keys()])) {
    const [shape, values] = [shapes.get(name), tensors.get(name)];
    if (shape === undefined || values?.length !== count(shape)) {
      const got = values === undefined ? "missing" : `${values.length} numbers`;
      throw new StorageError(`${what} ${name}: ${got}, wanted ${shape === undefined ? "none" : shape.join(" x ")}`);
    }
  }
}

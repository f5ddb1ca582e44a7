// Impatient hands at the writer: what is asked while something is at work comes out as if it had been asked alone.
import { describe, expect, test } from "vitest";
import type { Library } from "../src/worker/library.ts";
import type { FromWorker, ToWorker } from "../src/worker/protocol.ts";
import { siteOf } from "../src/worker/site.ts";
import { Writer } from "../src/worker/writer.ts";
import { host, tables } from "./assets.ts";

type Asked = Extract<ToWorker, { kind: "write" }>;

const library = {
  host,
  tables: async () => tables,
  site: async () => siteOf(tables),
  read: (name: string) => host.read(name),
} as unknown as Library;
const [first = "", second = ""] = siteOf(tables).models.map(({ name }) => name);

function write(id: number, model: string, prompt: string, tokens: number): Asked {
  const sampling = { temperature: 0.8, topK: 0, topP: 1, repetitionPenalty: 1, repetitionWindow: 64 };
  return { kind: "write", id, model: { kind: "bundled", name: model }, prompt, sampling, seed: 7, tokens, stop: [] };
}

/** A writer, and what it has told; `begun` resolves at its first letters. (A timer would wait: node lets a thousand messages in before one.) */
function desk(): { writer: Writer; told: FromWorker[]; text: (id: number) => number[]; begun: Promise<void> } {
  const told: FromWorker[] = [];
  const text = (id: number): number[] =>
    told.flatMap((message) => (message.kind === "written" && message.id === id ? message.tokens.map(({ token }) => token) : []));
  const { promise: begun, resolve } = Promise.withResolvers<void>();
  const writer = new Writer(library, (message) => {
    told.push(message);
    if (message.kind === "written") resolve();
  });
  return { writer, told, text, begun };
}

describe("a text that is asked for while another one is written", () => {
  test.each([["the same model", first], ["another model", second]])("is the text it is alone, by %s", async (_, model) => {
    const alone = desk();
    await alone.writer.write(write(1, model, "ROMEO:", 40));
    expect(alone.text(1)).toHaveLength(40);

    const { writer, told, text, begun } = desk();
    const before = writer.write(write(1, first, "JULIET:\nO", 100_000));
    await begun;
    await writer.write(write(2, model, "ROMEO:", 40));
    await before;
    expect(text(2)).toEqual(alone.text(1));
    expect(told.filter(({ kind }) => kind === "write-ended")).toMatchObject([{ id: 1, why: "stopped" }, { id: 2, why: "length" }]);
  });

  test("of several in a row the last one alone is written", async () => {
    const { writer, text } = desk();
    await Promise.all([1, 2, 3].map((id) => writer.write(write(id, first, "ROMEO:", 5))));
    expect([1, 2, 3].map((id) => text(id).length)).toEqual([0, 0, 5]);
  });
});

test("of several looks in a row the last one alone is told, and it is that of its own text", async () => {
  const look = (id: number, tokens: number[]): Extract<ToWorker, { kind: "attend" }> =>
    ({ kind: "attend", id, model: { kind: "bundled", name: first }, tokens, prompt: 1, layer: 0 });
  const [short, long] = [[82, 79, 77], [74, 85, 76, 73, 69, 84, 58]];
  const alone = desk();
  await alone.writer.attend(look(1, long));
  const { writer, told } = desk();
  await Promise.all([writer.attend(look(1, short)), writer.attend(look(2, long))]);
  expect(told).toMatchObject([{ kind: "attention", id: 2 }]);
  expect(told[0]).toEqual({ ...alone.told[0], id: 2 });
});

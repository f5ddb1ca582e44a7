// source.ts: which model an address asks the Write page for: ?run=NAME (&at=server), else the bundled one.
import type { ModelSource } from "../../worker/protocol.ts";

export function sourceOf(address: URL, bundled: string): ModelSource {
  const run = address.searchParams.get("run");
  if (run === null || run === "") return { kind: "bundled", name: bundled };
  return { kind: "run", name: run, place: address.searchParams.get("at") === "server" ? "server" : "tab" };
}

export const nameOfModel = (source: ModelSource): string => source.name;

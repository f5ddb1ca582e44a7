// choices.svelte.ts: what a person chose for the next run: preset, changes, text, engine; and the link that carries it.
import type { Tables } from "../../runtime/tables.ts";
import type { EngineChoice, StorePlace, TextSource } from "../../worker/protocol.ts";
import { wanted } from "../../storage/config_check.ts";
import { check, parse, settingsOf, takes } from "../../worker/settings.ts";
import type { Changes, Value, Wrong } from "../../worker/settings.ts";
import { siteOf } from "../../worker/site.ts";
import type { Settings } from "../../runtime/tables.ts";
import { places } from "./places.svelte.ts";
import type { Wish } from "./session.svelte.ts";

const ENGINES: readonly EngineChoice[] = ["auto", "webgpu", "wasm"];
const OTHER = new Set(["start", "run", "at", "engine", "preset"]);

class Choices {
  preset = $state("");
  changes = $state.raw<Changes>({});
  text = $state.raw<TextSource>({ kind: "bundled" });
  engine = $state<EngineChoice>("auto");
  #place = $state<StorePlace | null>(null);
  /** What a link asked for and was not taken. */
  rejected = $state.raw<readonly string[]>([]);
  /** Whether a person, or a link, chose the preset. */
  decided = $state(false);

  /** Where the run is kept: as was chosen, else in the folder that is served, once it is known that one is. */
  get place(): StorePlace {
    return this.#place ?? (places.server === null ? "tab" : "server");
  }

  set place(chosen: StorePlace) {
    this.#place = chosen;
  }

  settings(tables: Tables): Settings {
    return settingsOf(tables, this.preset, this.changes);
  }

  wrong(tables: Tables): Wrong[] {
    return check(tables, this.settings(tables));
  }

  wish(tables: Tables): Wish {
    return { settings: this.settings(tables), text: this.text, engine: this.engine, place: this.place };
  }

  choose(preset: string): void {
    this.preset = preset;
    this.decided = true;
  }

  change(key: string, value: Value, usual: Value): void {
    const { [key]: _, ...others } = this.changes;
    this.changes = value === usual ? others : { ...others, [key]: value };
  }

  /** Takes what a link says as far as the schema takes it. */
  read(tables: Tables, address: URL): void {
    const rejected: string[] = [];
    const { settings: fields, default_preset: usual } = tables.schema;
    const preset = address.searchParams.get("preset");
    if (preset !== null && tables.presets[preset] !== undefined) this.choose(preset);
    else if (preset !== null) rejected.push(`preset ${quoted(preset)}: there is none of that name`);
    if (this.preset === "") this.preset = usual;
    const engine = address.searchParams.get("engine");
    const known = ENGINES.find((one) => one === engine);
    if (known !== undefined) this.engine = known;
    else if (engine !== null) rejected.push(`engine ${quoted(engine)}: must be one of ${ENGINES.join(", ")}`);
    const changes: Record<string, Value> = {};
    for (const [key, text] of address.searchParams) {
      if (OTHER.has(key)) continue;
      const field = fields[key];
      if (field === undefined || siteOf(tables).hidden.includes(key)) {
        rejected.push(`${quoted(key)}: a tab has no such setting`);
        continue;
      }
      const value = parse(field, text);
      if (value === undefined || !takes(field, value)) rejected.push(`${key} ${quoted(text)}: must be ${wanted(field)}`);
      else changes[key] = value;
    }
    if (Object.keys(changes).length > 0) {
      const [wrong] = check(tables, settingsOf(tables, this.preset, changes));
      if (wrong === undefined) this.changes = changes;
      else rejected.push(`${wrong.message}; ${wrong.hint}`);
    }
    this.rejected = short([...new Set(rejected)]);
  }

  /** The address of this page that brings these choices back; a text of one's own does not go with it. */
  link(): string {
    const address = new URL(location.pathname, location.href);
    address.searchParams.set("preset", this.preset);
    if (this.engine !== "auto") address.searchParams.set("engine", this.engine);
    for (const [key, value] of Object.entries(this.changes)) address.searchParams.set(key, value === null ? "" : String(value));
    return address.href;
  }
}

const MOST_REJECTED = 8; // are listed one by one

const short = (texts: readonly string[]): readonly string[] =>
  texts.length <= MOST_REJECTED ? texts : [...texts.slice(0, MOST_REJECTED), `and ${texts.length - MOST_REJECTED} more`];

const quoted = (text: string): string => JSON.stringify(text.length > 40 ? `${text.slice(0, 37)}...` : text);

export const choices = new Choices();

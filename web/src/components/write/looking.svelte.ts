// looking.svelte.ts: the letter that is looked at: what was considered before it, and what the model looked back at.
import type { Letter } from "./letters.ts";
import { writing } from "./writing.svelte.ts";

const SHOWN_BEFORE = 16; // letters

export class Looking {
  /** The letter's index; -1 for none. */
  chosen = $state(-1);
  head = $state(0);
  #fromLast = $state(-1); // the layer, counted from the last one: a model of other depth shows the same end

  readonly letter: Letter | undefined = $derived(writing.letters[this.chosen]);

  /** The text just before it. */
  readonly before = $derived(
    (this.chosen > SHOWN_BEFORE ? "…" : "") + writing.letters.slice(Math.max(0, this.chosen - SHOWN_BEFORE), this.chosen).map((one) => one.text).join(""),
  );

  readonly layers = $derived(writing.about?.layers ?? 0);

  readonly layer = $derived(Math.max(0, this.layers + this.#fromLast));

  /** By letters: the weights of the tokens that a letter is made of, together. */
  readonly looks: ReadonlyMap<number, number> = $derived.by(() => {
    const found = new Map<number, number>();
    const { attention } = writing;
    if (!this.letter || !attention || attention.layer !== this.layer) return found;
    const time = attention.weights.length / attention.heads;
    const row = attention.weights.subarray(Math.min(this.head, attention.heads - 1) * time);
    writing.letters.forEach((one, index) => {
      let sum = 0;
      for (let k = one.at - attention.first; k < one.at + one.length - attention.first; k++) if (k >= 0 && k < time) sum += row[k] ?? 0;
      if (sum > 0) found.set(index, sum);
    });
    return found;
  });

  chooseLayer(layer: number): void {
    this.#fromLast = layer - this.layers;
  }
}

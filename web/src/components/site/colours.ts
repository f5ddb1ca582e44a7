// colours.ts: the tokens of the style sheet for what is drawn on a canvas.

export interface Colours {
  readonly soft: string;
  readonly line: string;
  readonly axis: string;
  readonly curves: readonly string[];
}

const CURVES = [1, 2, 3, 4, 5].map((k) => `curve-${k}`);

/** As they are now: a token is light-dark(...) until an element has it as its colour. */
export function colours(): Colours {
  const of = (token: string): string => {
    const probe = document.createElement("span"); // of its own: a change of colour may be a transition
    probe.style.color = `var(--${token})`;
    document.documentElement.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  };
  return { soft: of("soft"), line: of("line"), axis: of("line-strong"), curves: CURVES.map(of) };
}

/** The same colour, to be seen through. */
export const faint = (colour: string): string => colour.replace("rgb(", "rgba(").replace(")", ", 0.35)");

/** Calls back when the page changes between light and dark; returns what ends it. */
export function watchColours(changed: () => void): () => void {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(changed);
  query.addEventListener("change", changed);
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  return () => {
    query.removeEventListener("change", changed);
    observer.disconnect();
  };
}

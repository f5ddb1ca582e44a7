// colours.ts: the tokens of the style sheet for what is drawn on a canvas.

export interface Colours {
  readonly ink: string;
  readonly soft: string;
  readonly line: string;
  readonly paper: string;
  readonly curves: readonly string[];
}

export function colours(): Colours {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string): string => style.getPropertyValue(`--${name}`).trim();
  return { ink: of("ink"), soft: of("soft"), line: of("line-strong"), paper: of("card"), curves: [1, 2, 3, 4, 5].map((k) => of(`curve-${k}`)) };
}

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

// root.ts: where the site lies, whatever path it is served below.

let found: URL | undefined;

/** The address of the site's root, with a slash at its end; the same after every change of page. */
export function site(): URL {
  found ??= new URL("./", document.baseURI);
  return found;
}

/** The address of a file that export_web.py wrote. */
export const dataUrl = (name = ""): URL => new URL(`data/${name}`, site());

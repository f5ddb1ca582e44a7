// keep.ts: asking the browser to keep what this page stores. Only a page may ask, not a worker.

/** Asks the browser, once a run exists, not to clear this page's storage when it needs room. */
export async function askToKeep(): Promise<void> {
  const storage = (globalThis.navigator as Navigator | undefined)?.storage as StorageManager | undefined;
  try {
    if (storage?.persist !== undefined && !(await storage.persisted())) await storage.persist();
  } catch {
    // a browser that does not say: the page shows what it knows (usage)
  }
}

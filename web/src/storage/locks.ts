// locks.ts: one writer a run. The browser holds the lock and gives it back when the tab ends, however it ends.

export type Release = () => void;

const here = new Set<string>();

/** Takes a lock that nobody holds; null when it is taken. Without Web Locks only this page is watched. */
export async function takeLock(key: string): Promise<Release | null> {
  const locks = lockManager();
  if (locks === undefined) {
    if (here.has(key)) return null;
    here.add(key);
    return () => here.delete(key);
  }
  return new Promise((answer, fail) => {
    const held = locks.request(key, { ifAvailable: true }, (lock) => {
      if (lock === null) return answer(null);
      return new Promise<void>((end) => answer(end));
    });
    held.catch(fail);
  });
}

/** Runs something while nobody else does, waiting for them. */
export async function withLock<T>(key: string, work: () => Promise<T>): Promise<T> {
  const locks = lockManager();
  return locks === undefined ? work() : (locks.request(key, work) as Promise<T>);
}

/** The keys that are held by any tab. */
export async function heldLocks(): Promise<ReadonlySet<string>> {
  const locks = lockManager();
  if (locks === undefined) return here;
  return new Set((await locks.query()).held?.map((lock) => lock.name ?? ""));
}

const lockManager = (): LockManager | undefined => (globalThis.navigator as Navigator | undefined)?.locks;

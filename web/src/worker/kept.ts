// kept.ts: short texts that last from visit to visit; where the browser keeps nothing, nothing is kept.
import type { CheckStorage } from "../runtime/webgpu_check.ts";

const STORE = "kept";

function open(): Promise<IDBDatabase> {
  return new Promise((done, failed) => {
    const request = indexedDB.open("posttrainllm", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
    request.onblocked = () => failed(new Error("the database is blocked"));
  });
}

async function within<T>(mode: IDBTransactionMode, act: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  const database = await open();
  try {
    return await new Promise<T>((done, failed) => {
      const request = act(database.transaction(STORE, mode).objectStore(STORE));
      request.onsuccess = () => done(request.result);
      request.onerror = () => failed(request.error);
    });
  } finally {
    database.close();
  }
}

export const kept: CheckStorage = {
  async get(key) {
    const found: unknown = await within("readonly", (store) => store.get(key) as IDBRequest<unknown>).catch(() => null);
    return typeof found === "string" ? found : null;
  },
  async set(key, value) {
    await within("readwrite", (store) => store.put(value, key)).catch(() => {});
  },
};

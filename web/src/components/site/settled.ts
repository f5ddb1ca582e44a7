// settled.ts: when a page on a host that does not isolate has been loaded once more by Isolation.astro, or will not be.

const PATIENCE_MS = 4000; // for the service worker, which may not come at all

/** Resolves once the page is not about to be loaded again. */
export async function settled(): Promise<void> {
  if (crossOriginIsolated || !isSecureContext || !navigator.serviceWorker || tried()) return;
  await new Promise((again) => setTimeout(again, PATIENCE_MS)); // a reload ends this wait, and the page with it
}

function tried(): boolean {
  try {
    return sessionStorage.getItem("isolated") !== null;
  } catch {
    return true; // Isolation.astro does not reload either
  }
}

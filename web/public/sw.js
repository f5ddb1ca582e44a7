// sw.js: what a static host lacks: the headers that threads in WebAssembly need, and the site without a network.
//
// Every answer of this site gets COOP, COEP and CORP, so that the pages are cross-origin isolated. Online, pages and data
// are always asked for (304 when they are as before), so that nothing old is shown after an update; files with a hash in
// their name come from the cache. Offline, everything comes from the cache, which is filled after the first page has
// settled: entries are named by content, so that an update fetches only what changed, and what no build needs is removed.
// Models are large: one is kept when it is used.
// `posttrainllm play` sends these headers itself and never registers this.

const FILES = {}; // path -> hash of its content: written in by tools/offline.mjs at the end of a build
const CACHE = "posttrainllm";
const HASHED = "_astro/";
const ON_USE = "data/models/";
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
};

self.addEventListener("install", () => void self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

// The page says when it has settled; then there is time to fetch the rest.
self.addEventListener("message", (event) => {
  if (event.data === "keep" && new URL(event.source?.url ?? "about:blank").origin === location.origin) {
    event.waitUntil(keepAll());
  }
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const path = pathOf(request.url);
  const odd = request.cache === "only-if-cached" && request.mode !== "same-origin";
  if (path === null || request.method !== "GET" || request.headers.has("range") || odd) return;
  event.respondWith(path.startsWith(HASHED) ? cachedFirst(request, path) : newestFirst(event, path));
});

/** The file below this site that an address means, or null when it lies elsewhere. */
function pathOf(address) {
  const scope = new URL(self.registration.scope);
  const { origin, pathname } = new URL(address);
  if (origin !== scope.origin || !pathname.startsWith(scope.pathname)) return null;
  const path = plain(pathname.slice(scope.pathname.length));
  if (path === null || path.startsWith("api/")) return null;
  return path === "" || path.endsWith("/") ? `${path}index.html` : path;
}

/** A path as files have it; null for escapes that mean nothing. */
function plain(escaped) {
  try {
    return decodeURIComponent(escaped);
  } catch {
    return null;
  }
}

/** The name of a file in the cache: its path and what is in it. */
function keyOf(path) {
  return FILES[path] ? new URL(`${path}?${FILES[path]}`, self.registration.scope).href : null;
}

async function cached(path) {
  const key = keyOf(path);
  return key === null ? undefined : (await caches.open(CACHE)).match(key);
}

async function cachedFirst(request, path) {
  return (await cached(path)) ?? isolated(await fetch(request));
}

async function newestFirst(event, path) {
  const { request } = event;
  try {
    // A page's request cannot be repeated with another mode; its address can.
    const asked = request.mode === "navigate" ? new Request(request.url, { redirect: "manual" }) : request;
    const answer = await fetch(asked, { cache: "no-cache" });
    if (path.startsWith(ON_USE) && answer.ok) event.waitUntil(keep(path, answer.clone()));
    return answer.type === "opaqueredirect" ? answer : isolated(answer);
  } catch (error) {
    const kept = (await cached(path)) ?? (await cached(`${path}/index.html`));
    if (kept) return kept;
    throw error;
  }
}

/** The same answer with the headers that isolate a page. */
function isolated(answer) {
  if (answer.type === "opaque" || answer.status === 0) return answer;
  const headers = new Headers(answer.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  const empty = [101, 204, 205, 304].includes(answer.status);
  return new Response(empty ? null : answer.body, { status: answer.status, statusText: answer.statusText, headers });
}

/** Put an answer into the cache, with our headers, when it is the file of this build. */
async function keep(path, answer) {
  const key = keyOf(path);
  if (key === null || !answer.ok || (await hashOf(answer.clone())) !== FILES[path]) return false;
  await (await caches.open(CACHE)).put(key, isolated(answer));
  return true;
}

let keeping = null;

/** Fetch what is missing, then remove what this build has not; one at a time. */
function keepAll() {
  keeping ??= fetchMissing().finally(() => (keeping = null));
  return keeping;
}

async function fetchMissing() {
  const cache = await caches.open(CACHE);
  for (const path of Object.keys(FILES)) {
    if (path.startsWith(ON_USE) || (await cached(path))) continue;
    const answer = await fetch(new URL(path, self.registration.scope), { cache: "no-cache" });
    if (!(await keep(path, answer))) return; // a newer build is on the host: its worker will come
  }
  const needed = new Set(Object.keys(FILES).map(keyOf));
  for (const request of await cache.keys()) if (!needed.has(request.url)) await cache.delete(request);
}

async function hashOf(answer) {
  const digest = await crypto.subtle.digest("SHA-256", await answer.arrayBuffer());
  return Array.from(new Uint8Array(digest).subarray(0, 8), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

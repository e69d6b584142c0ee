// Fetches the swarm periodically, each time with a deadline, and reports the data or the reason of the failure.

const EVERY = 2000; // ms
const DEADLINE = 8000;
const REST = 3; // pause for three times the time to fetch and draw an answer: large swarms on slow phones

/** No usable answer. `kind`: gone (no answer), unread (the bootstrap cannot read its directory), strange (all else). */
export class Trouble extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function read(address) {
  let response, body;
  try {
    response = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(DEADLINE) });
    body = await response.text();
  } catch {
    throw new Trouble("gone", "no answer");
  }
  let data = null;
  try {
    data = JSON.parse(body);
  } catch {
    // Perhaps a proxy's message; reported below.
  }
  if (response.status === 503 && data?.error) throw new Trouble("unread", String(data.error));
  if (response.status === 502 || response.status === 504) throw new Trouble("gone", `status ${response.status}`);
  if (!response.ok || !Array.isArray(data?.runs)) throw new Trouble("strange", `status ${response.status}`);
  return data;
}

/** Calls `heard(data)` or `unheard(trouble)` about every two seconds while the page is visible. */
export function watch(address, heard, unheard) {
  let timer = 0;
  let asking = false;

  async function ask() {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    const began = performance.now();
    try {
      await read(address).then(heard, unheard);
    } finally {
      asking = false;
      timer = setTimeout(next, Math.max(EVERY, REST * (performance.now() - began)));
    }
  }

  function next() {
    if (!document.hidden) ask();
  }

  document.addEventListener("visibilitychange", next);
  ask();
}

// Asks for the swarm again and again, each time with a deadline, and says what came or why nothing did.

const EVERY = 2000; // ms
const DEADLINE = 8000;
const REST = 3; // rest three times as long as an answer took to fetch and draw: large swarms on small phones

/** Nothing usable came. `kind`: gone (no answer), unread (the bootstrap cannot read its directory), strange. */
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
    // Some proxy's words, perhaps: said below.
  }
  if (response.status === 503 && data?.error) throw new Trouble("unread", String(data.error));
  if (response.status === 502 || response.status === 504) throw new Trouble("gone", `status ${response.status}`);
  if (!response.ok || !Array.isArray(data?.runs)) throw new Trouble("strange", `status ${response.status}`);
  return data;
}

/** Calls `heard(data)` or `unheard(trouble)` about every two seconds while somebody can see the page. */
export function watch(address, heard, unheard) {
  let timer = 0;
  let asking = false;

  async function ask() {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    const began = performance.now();
    try {
      let data = null;
      try {
        data = await read(address);
      } catch (trouble) {
        unheard(trouble);
      }
      if (data) heard(data);
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

// Numbers, times and untrusted strings as readable text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const NOTHING = "–";
const brief = (value) => (Math.abs(value) < 1e15 ? short.format(value) : value.toExponential(1));

/** A finite number, or null: records of other peers may hold any value. */
export const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

/** The value if it is a list, or an empty list. */
export const list = (value) => (Array.isArray(value) ? value : []);

const orNothing = (format) => (value) => (number(value) === null ? NOTHING : format(value));

export const integer = orNothing((value) => (Math.abs(value) < 1e9 ? whole.format(value) : brief(value)));
export const compact = orNothing((value) => (Math.abs(value) < 1e4 ? whole.format(value) : brief(value)));
export const percent = orNothing((value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`);
export const percentTick = (value) => `${Math.round(100 * value)}%`;
export const loss = orNothing((value) => (Math.abs(value) < 1000 ? value.toFixed(3) : brief(value)));

/** Does the peer take part? One that is paused comes back. */
export const there = (peer) => ["training", "waiting", "paused"].includes(peer.state);

/** A duration: 4 s, 3 min, 2 h 5 min, 3 days. */
export const duration = orNothing((seconds) => {
  const s = Math.max(0, seconds);
  if (s < 59.5) return `${Math.round(s)} s`;
  if (s < 3570) return `${Math.round(s / 60)} min`;
  const minutes = Math.round(s / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(s / 86400)} days`;
});

/** Unix seconds as local time of day. */
export function clock(unix, withSeconds = true) {
  const at = new Date(1000 * (number(unix) ?? NaN));
  if (Number.isNaN(at.getTime())) return NOTHING;
  return at.toLocaleTimeString("en-GB", { timeStyle: withSeconds ? "medium" : "short" });
}

/** Unix seconds as a local date without the year. */
export const date = (unix) => new Date(1000 * unix).toLocaleDateString("en", { day: "numeric", month: "short" });

/** Unix seconds as local time of day, after the date if that is not today's. */
export function moment(unix) {
  const time = clock(unix);
  if (time === NOTHING || new Date(1000 * unix).toDateString() === new Date().toDateString()) return time;
  return `${date(unix)}, ${time}`;
}

/** 1 peer, 2 peers. */
export const count = (n, one, many = `${one}s`) => `${integer(n)} ${n === 1 ? one : many}`;

// Invisible characters and those that change the text direction. Emoji and Persian need the three exceptions.
const HIDDEN = /\p{Cc}|(?![\u200c\u200d\ufe0f])\p{Default_Ignorable_Code_Point}/gu;
const VISIBLE = /[^\p{Default_Ignorable_Code_Point}\p{Z}\p{C}\p{M}]/u;

/** An untrusted string, cleaned so that it cannot be invisible or affect other text. */
export function plain(text, most = 300) {
  const clean = String(text ?? "")
    .replace(/\s+/g, " ")
    .replace(HIDDEN, "")
    .replace(/(\p{M}{2})\p{M}+/gu, "$1");
  const letters = Array.from(clean);
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : clean;
}

/** The end of a peer id, as a short form. */
export const tail = (id) => `…${plain(id).slice(-6)}`;

/** Map of peer id -> name to show. The end of the id replaces an invisible name and follows a name that two peers have. */
export function names(peers) {
  const cleaned = peers.map((peer) => [String(peer.peer_id), plain(peer.name, 64).trim()]);
  const seen = new Map();
  for (const [, name] of cleaned) seen.set(name, (seen.get(name) ?? 0) + 1);
  return new Map(
    cleaned.map(([id, name]) => {
      if (!VISIBLE.test(name)) return [id, tail(id)];
      return [id, seen.get(name) > 1 ? `${name} ${tail(id)}` : name];
    }),
  );
}

/** A name for use in a sentence: its text direction does not affect the rest. */
export const isolated = (name) => `\u2068${name}\u2069`;

/** Natural order: peer-2 before peer-10. */
export const inOrder = new Intl.Collator("en", { numeric: true }).compare;

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

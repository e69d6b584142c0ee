// Recent merges: peers on a circle, a line between two that merged; thicker with their number, fainter with their age.

import { keyed, say, set, svg } from "./dom.js";
import { count, duration, inOrder, integer, isolated, list, number, there } from "./words.js";

const LATELY = 600; // seconds that the bootstrap remembers
const MOST_LINES = 1500; // the newest; more cannot be told apart
const MOST_NAMES = 28;
const LETTERS = 12;

export class Meetings {
  #last = null;

  constructor(figure, toggled) {
    this.plot = figure.querySelector(".plot");
    this.caption = figure.querySelector("figcaption");
    this.readout = figure.querySelector("output");
    this.toggled = toggled;
    this.picture = svg("svg", { role: "img" }, this.plot);
    this.edges = svg("g", { class: "edges" }, this.picture);
    this.nodes = svg("g", { class: "nodes" }, this.picture);
    new ResizeObserver(() => this.#last && this.draw(...this.#last)).observe(this.plot);
  }

  /** `names`: Map of id -> name; `following`: the peers to highlight. */
  draw(run, names, following) {
    this.#last = [run, names, following];
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (!width || !height) return;
    const pairs = checked(run, names);
    const summary = describe(pairs, present(run, names), names);
    say(this.caption, summary);
    set(this.picture, { width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": summary });
    const ids = circleOf(run, names, pairs);
    const named = ids.length <= MOST_NAMES;
    const radius = Math.max(40, Math.min(width / 2 - (named ? 92 : 16), height / 2 - 26));
    const places = new Map(ids.map((id, i) => [id, place(i, ids.length, width / 2, height / 2, radius)]));
    this.#edges(pairs, places, width / 2, height / 2, names, following);
    this.#nodes(run, ids, places, named, names, following);
  }

  #edges(pairs, places, cx, cy, names, following) {
    const marked = following.chosen.length > 0;
    const room = Math.min(1, Math.sqrt(90 / Math.max(1, pairs.length))); // thinner and paler if there are many lines
    const most = pairs.reduce((sum, pair) => Math.max(sum, pair.count), 2);
    keyed(this.edges, pairs.slice(0, MOST_LINES).reverse(), (pair) => `${pair.a} ${pair.b}`, () => {
      const line = svg("path");
      svg("title", {}, line);
      return line;
    }, (line, pair) => {
      const a = places.get(pair.a);
      const b = places.get(pair.b);
      const chosen = [pair.a, pair.b].find((id) => following.has(id));
      const fresh = Math.max(0, 1 - pair.age / LATELY);
      set(line, {
        d: `M${a.x} ${a.y}Q${0.3 * (a.x + b.x) + 0.4 * cx} ${0.3 * (a.y + b.y) + 0.4 * cy} ${b.x} ${b.y}`,
        "stroke-width": ((1 + (3 * (pair.count - 1)) / (most - 1)) * (chosen ? 1 : Math.max(0.5, room))).toFixed(2),
        "stroke-opacity": ((chosen ? 1 : marked ? 0.2 * room : room) * (0.12 + 0.7 * fresh * fresh)).toFixed(3),
        class: chosen ? following.look(chosen) : "plain",
      });
      const [first, second] = [pair.a, pair.b].map((id) => isolated(names.get(id)));
      say(line.firstChild, `${first} and ${second}: ${count(pair.count, "swap")}, the last ${duration(pair.age)} ago`);
    });
  }

  #nodes(run, ids, places, named, names, following) {
    const states = new Map(list(run.peers).map((peer) => [String(peer.peer_id), peer.state]));
    const small = Math.min(4, 420 / ids.length).toFixed(1);
    keyed(this.nodes, ids, (id) => id, (id) => {
      const g = svg("g");
      svg("title", {}, g);
      svg("circle", {}, g);
      svg("text", {}, g);
      g.addEventListener("click", () => this.toggled(id));
      return g;
    }, (g, id) => {
      const at = places.get(id);
      set(g, { class: `${following.look(id)} ${states.get(id) ?? ""}` });
      const [title, dot, label] = g.children;
      say(title, names.get(id));
      set(dot, { cx: at.x, cy: at.y, r: following.has(id) ? 7 : named ? 5.5 : small });
      const spoken = named || following.has(id);
      say(label, spoken ? shortened(names.get(id)) : "");
      set(label, { x: at.x + 12 * at.dx, y: at.y + 15 * at.dy + 4, "text-anchor": side(at.dx) });
    });
  }
}

const side = (dx) => (Math.abs(dx) < 0.25 ? "middle" : dx > 0 ? "start" : "end");
const present = (run, names) =>
  list(run.peers).filter((peer) => run.ended || there(peer)).map((peer) => String(peer.peer_id)).filter((id) => names.has(id));

function place(i, n, cx, cy, radius) {
  const angle = (2 * Math.PI * i) / n - Math.PI / 2;
  const [dx, dy] = [Math.cos(angle), Math.sin(angle)];
  return { x: +(cx + radius * dx).toFixed(1), y: +(cy + radius * dy).toFixed(1), dx, dy };
}

function shortened(name) {
  const letters = Array.from(name);
  return letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : name;
}

/** Valid pairs of known peers, newest first. */
function checked(run, names) {
  return list(run.meetings)
    .map((it) => ({ a: String(it?.a), b: String(it?.b), age: number(it?.age) ?? LATELY, count: number(it?.count) ?? 1 }))
    .filter((it) => names.has(it.a) && names.has(it.b) && it.a !== it.b)
    .sort((one, other) => one.age - other.age);
}

/** Present peers and partners of merges, in the order of their names. */
function circleOf(run, names, pairs) {
  const ids = new Set([...present(run, names), ...pairs.flatMap((pair) => [pair.a, pair.b])]);
  return [...ids].sort((a, b) => inOrder(names.get(a), names.get(b)));
}

function describe(pairs, ids, names) {
  if (!pairs.length) return "No two peers merged in the last 10 minutes.";
  const partners = new Map(ids.map((id) => [id, new Set()]));
  for (const { a, b } of pairs) {
    partners.get(a)?.add(b);
    partners.get(b)?.add(a);
  }
  const sizes = [...partners.values()].map((met) => met.size).filter(Boolean);
  const alone = ids.filter((id) => !partners.get(id).size).map((id) => isolated(names.get(id)));
  let text = `${count(pairs.length, "pair")} merged in the last 10 minutes`;
  if (sizes.length) {
    const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
    text += `; each peer merged with ${least === most ? count(least, "other") : `${integer(least)} to ${count(most, "other")}`}`;
  }
  if (!alone.length) return `${text}.`;
  return `${text}. Without a partner: ${alone.length > 4 ? count(alone.length, "peer") : alone.join(", ")}.`;
}

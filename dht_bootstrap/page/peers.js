// The table of peers. A click on a column head sorts it; a click on a name follows the peer in the charts.

import { el, keyed, say, set } from "./dom.js";
import { compact, duration, inOrder, integer, isolated, list, loss, number, percent, plain, tail } from "./words.js";

const HEALTHY = 0.1;
const ORDER = ["training", "waiting", "paused", "lost", "left"];
const stateOf = (peer) => (ORDER.includes(peer.state) ? peer.state : null);
const met = (peer) => list(peer.partners).at(-1);

// key, head, tooltip, text, value to sort by, largest first
const COLUMNS = [
  ["name", "Peer", "click a name to follow the peer in the charts", null, null, false],
  ["state", "State", "paused: it comes back; lost: its record expired without a departure", (p) => stateOf(p) ?? "?", (p) => ORDER.indexOf(p.state), false],
  ["idle", "Idle", "share of the last 5 minutes spent waiting for others", (p) => percent(p.idle_share), (p) => p.idle_share, true],
  ["loss", "Loss", "training loss of the last inner phase", (p) => loss(p.train_loss), (p) => p.train_loss, true],
  ["val", "Val loss", "loss on held-out text", (p) => loss(p.val_loss), (p) => p.val_loss, true],
  ["rate", "Tokens/s", "", (p) => compact(p.tokens_per_second), (p) => p.tokens_per_second, true],
  ["step", "Step", "inner steps", (p) => integer(p.step), (p) => p.step, true],
  ["round", "Round", "swaps, one after each inner phase", (p) => integer(p.round), (p) => p.round, true],
  ["met", "Met last", "its latest partner", null, (p) => p.merged_age, false],
  ["age", "Heard", "time since its record was written", (p) => `${duration(p.age)} ago`, (p) => p.age, false],
];

export class PeerTable {
  #sort = "name";
  #down = false;
  #last = null;

  constructor(section, toggled) {
    this.head = section.querySelector("thead tr");
    this.body = section.querySelector("tbody");
    this.details = section.querySelector("#details");
    this.toggled = toggled;
  }

  draw(run, names, following) {
    this.#last = [run, names, following];
    keyed(this.head, COLUMNS, (column) => column[0], (column) => this.#makeHead(column), (th, [key]) => {
      set(th, { "aria-sort": key === this.#sort ? (this.#down ? "descending" : "ascending") : null });
    });
    const peers = this.#sorted(list(run.peers), names);
    keyed(this.body, peers, (peer) => String(peer.peer_id), (peer) => this.#makeRow(peer), (row, peer) => {
      fill(row, peer, names, following);
    });
    const followed = peers.filter((peer) => following.has(String(peer.peer_id)));
    keyed(this.details, followed, (peer) => String(peer.peer_id), makeDetails, (box, peer) => describe(box, peer, names, following));
  }

  #sorted(peers, names) {
    const value = COLUMNS.find((column) => column[0] === this.#sort)[4];
    const name = (peer) => names.get(String(peer.peer_id)) ?? "";
    const sign = this.#down ? -1 : 1;
    return [...peers].sort((a, b) => {
      if (!value) return sign * inOrder(name(a), name(b));
      const [one, other] = [number(value(a)), number(value(b))];
      if (one === null || other === null) return (one === null) - (other === null) || inOrder(name(a), name(b));
      return sign * (one - other) || inOrder(name(a), name(b));
    });
  }

  #makeHead([key, text, title, , , largestFirst]) {
    const th = el("th", key);
    const button = el("button", "", text);
    set(th, { scope: "col" });
    set(button, { type: "button", ...(title && { title }) });
    button.addEventListener("click", () => {
      this.#down = this.#sort === key ? !this.#down : largestFirst;
      this.#sort = key;
      this.draw(...this.#last);
    });
    th.append(button);
    return th;
  }

  #makeRow(peer) {
    const row = el("tr");
    for (const [key] of COLUMNS) {
      const cell = el(key === "name" ? "th" : "td", key);
      if (key === "name") {
        set(cell, { scope: "row" });
        const button = el("button");
        set(button, { type: "button" });
        button.append(el("span", "swatch"), el("bdi"));
        button.addEventListener("click", () => this.toggled(String(peer.peer_id)));
        cell.append(button);
      } else if (key === "met") cell.append(el("bdi"), el("span", "quiet"));
      row.append(cell);
    }
    return row;
  }
}

function fill(row, peer, names, following) {
  const id = String(peer.peer_id);
  const state = stateOf(peer) ?? "unknown";
  set(row, { class: `${following.look(id)} ${state}` });
  COLUMNS.forEach(([key, , , text], i) => {
    const cell = row.children[i];
    if (text) say(cell, text(peer));
    if (key === "name") {
      set(cell.firstChild, { "aria-pressed": following.has(id), title: plain(id, 80) });
      say(cell.querySelector("bdi"), names.get(id));
    } else if (key === "met") {
      const other = met(peer);
      say(cell.firstChild, other === undefined ? "–" : (names.get(String(other)) ?? tail(other)));
      const ago = number(peer.merged_age);
      say(cell.lastChild, other === undefined || ago === null ? "" : ` ${duration(ago)} ago`);
    } else if (key === "idle") {
      cell.classList.toggle("bad", (number(peer.idle_share) ?? 0) > HEALTHY);
    }
  });
}

function makeDetails() {
  const box = el("dl", "detail");
  for (const head of ["Peer", "Peer id", "Sees", "Met lately", "Refused lately", "Version", "Configuration"]) {
    const pair = el("div");
    pair.append(el("dt", "", head), el("dd"));
    box.append(pair);
  }
  return box;
}

function describe(box, peer, names, following) {
  const id = String(peer.peer_id);
  const values = [
    names.get(id),
    plain(id, 80),
    `${integer(peer.members)} members`,
    list(peer.partners).map((other) => isolated(names.get(String(other)) ?? tail(other))).reverse().join(", ") || "none",
    number(peer.refused) ? `${integer(peer.refused)} contributions in 15 minutes` : "none",
    plain(peer.version, 40) || "–",
    plain(peer.config, 80) || "–",
  ];
  set(box, { class: `detail ${following.look(id)}` });
  [...box.children].forEach((pair, i) => {
    set(pair.lastChild, { dir: "auto" });
    say(pair.lastChild, values[i]);
  });
}

// One run: its figures, its charts, its peers.

import { Chart } from "./chart.js";
import { givenTokens } from "./contributors.js";
import { el, keyed, say, set, show } from "./dom.js";
import { COLOURS, Following } from "./following.js";
import { Meetings } from "./meetings.js";
import { PeerTable } from "./peers.js";
import { around, upTo } from "./scale.js";
import { idle, losses, medianLine, speeds } from "./series.js";
import { compact, count, duration, inOrder, integer, isolated, list, loss, median, names, number, percent, percentTick, there } from "./words.js";

const HEALTHY = 0.1; // idle share
const known = (peers, key) => peers.filter((peer) => number(peer[key]) !== null);

export class RunView {
  #run = null;
  #given = null;

  constructor(place) {
    this.place = place;
    this.following = new Following(() => this.draw(this.#run, this.#given));
    const toggled = (id) => this.following.toggle(id);
    const find = (selector) => place.querySelector(selector);
    this.idle = new Chart(find("#idle"), {
      format: percent,
      tick: percentTick,
      range: (values) => upTo(values, [0.2, 0.5, 1]),
      band: { to: HEALTHY, text: "healthy: below 10%" },
    });
    this.loss = new Chart(find("#loss"), { format: (value) => value.toFixed(2), range: around });
    this.speed = new Chart(find("#speed"), {
      format: (value) => `${+value.toPrecision(3)}/s`,
      range: (values, peaks) => [0, around([0, ...values], peaks)[1]],
    });
    this.meetings = new Meetings(find("#meetings"), toggled);
    this.table = new PeerTable(find("#peers"), toggled);
    for (const radio of place.querySelectorAll("[name=against]")) {
      radio.addEventListener("change", () => this.draw(this.#run, this.#given));
    }
  }

  /** `given`: the contributors of all runs. */
  draw(run, given) {
    if (!run) return;
    if (this.#run?.run !== run.run) this.following.clear();
    this.#run = run;
    this.#given = given;
    const peers = list(run.peers).filter((peer) => peer && typeof peer === "object");
    const named = names(peers);
    peers.sort((a, b) => inOrder(named.get(String(a.peer_id)), named.get(String(b.peer_id))));
    this.following.see(peers.map((peer) => String(peer.peer_id)));
    const ended = number(run.ended_age) !== null;
    const present = ended ? peers : peers.filter(there);
    const note = this.place.querySelector("#ended");
    show(note, ended);
    if (ended) say(note, `This run ended ${duration(run.ended_age)} ago. These are its last figures.`);
    figures(this.place.querySelector("#figures"), run, peers, present, ended, givenTokens(given, run));
    this.#legend(peers, named);
    this.#charts(peers, named, present, ended ? "At the end" : "Now");
    this.meetings.draw({ ...run, peers, ended }, named, this.following);
    this.table.draw({ ...run, peers }, named, this.following);
  }

  #legend(peers, named) {
    const { following } = this;
    const chips = following.coloured.map((id) => ({ id, name: named.get(id) }));
    chips.sort((a, b) => inOrder(a.name, b.name));
    if (following.chosen.length) chips.push({ id: " all", name: following.many ? "Follow none" : "Show all" });
    keyed(this.place.querySelector("#legend"), chips, (chip) => chip.id, ({ id }) => {
      const button = el("button", "chip");
      set(button, { type: "button" });
      if (id !== " all") button.append(el("span", "swatch"));
      button.append(el("bdi"));
      button.addEventListener("click", () => (id === " all" ? following.clear() : following.toggle(id)));
      return button;
    }, (button, { id, name }) => {
      set(button, { class: `chip ${id === " all" ? "all" : following.look(id)}`, "aria-pressed": id === " all" ? null : following.has(id) });
      say(button.lastChild, name);
    });
    const hint = this.place.querySelector("#hint");
    show(hint, following.many);
    say(hint, `${count(peers.length, "peer")}: each has a thin line, the thick line is the median. Choose up to ${COLOURS} in the table or the circle to show them in colour.`);
  }

  /** `when`: of the figures. */
  #charts(peers, named, live, when) {
    const by = this.place.querySelector("[name=against]:checked").value;
    this.idle.draw({ by: "time", lines: this.#lines(idle(peers), named, (y) => y > HEALTHY), summary: idleWords(live, named) });
    this.loss.draw({ by, lines: this.#lines(losses(peers, by), named), summary: lossWords(live, named, when) });
    this.speed.draw({ by: "time", lines: this.#lines(speeds(peers), named), summary: speedWords(live, named, when) });
  }

  /** Lines with name and look; highlighted ones on top. `bad(y)` decides by a line's last value whether to mark it. */
  #lines(lines, named, bad = () => false) {
    const { following } = this;
    const found = lines.map((line) => {
      const last = line.points.at(-1)?.[1] ?? null;
      const gone = line.state === "left" || line.state === "lost" ? " gone" : "";
      const marked = following.many && !gone && last !== null && bad(last) ? " bad" : "";
      return { ...line, name: named.get(line.id), look: following.look(line.id) + gone + marked };
    });
    const height = (look) => 4 * look.includes("chosen") + 2 * look.includes("bad") - look.includes("muted");
    found.sort((a, b) => height(a.look) - height(b.look));
    if (!following.many) return found;
    const middle = { id: " median", name: "Median", look: "middle", points: medianLine(lines) };
    return [...found.filter((line) => !following.has(line.id)), middle, ...found.filter((line) => following.has(line.id))];
  }
}

/** `given`: tokens of the contributors. Those of the run's records count since the start of each peer's process. */
function figures(place, run, peers, live, ended, given) {
  const losses = known(live, "val_loss").map((peer) => peer.val_loss);
  const share = number(run.idle_share);
  const rows = [
    ["Idle", percent(run.idle_share), share === null ? "no data yet" : share < HEALTHY ? "healthy: below 10%" : "too much: above 10%"],
    ["Peers", integer(run.members), ended ? "at the end" : gone(run, peers)],
    ["Tokens per second", compact(run.tokens_per_second), ended ? "at the end" : "all peers together"],
    ["Tokens", compact(given ?? run.tokens), given === null ? "since each peer's last start" : "of all contributors"],
    ["Step", integer(run.step), "the furthest peer"],
    ["Validation loss", loss(median(losses)), losses.length > 1 ? `worst peer ${loss(Math.max(...losses))}` : "on held-out text"],
  ];
  keyed(place, rows, (row) => row[0], ([head]) => {
    const box = el("div");
    box.append(el("dt", "", head), el("dd"), el("dd", "quiet"));
    return box;
  }, (box, [head, value, note]) => {
    say(box.children[1], value);
    say(box.children[2], note);
    set(box, { class: head === "Idle" && share !== null ? (share < HEALTHY ? "good" : "bad") : null });
  });
}

function gone(run, peers) {
  const lost = peers.filter((peer) => peer.state === "lost").length;
  const idle = ["waiting", "paused"].map((state) => [state, peers.filter((peer) => peer.state === state).length]);
  const words = [...idle.map(([state, n]) => n && `${integer(n)} ${state}`), lost && `${integer(lost)} lost`, number(run.unnamed) > 0 && `${integer(run.unnamed)} without a row`].filter(Boolean);
  return words.join(", ") || "training";
}

/** The median and the extreme of a value over the present peers. */
function extremes(live, key, named, sign) {
  const peers = known(live, key);
  if (!peers.length) return null;
  const last = peers.reduce((worst, peer) => (sign * peer[key] > sign * worst[key] ? peer : worst));
  const name = isolated(named.get(String(last.peer_id)));
  return { middle: median(peers.map((peer) => peer[key])), name, value: last[key], n: peers.length };
}

function idleWords(live, named) {
  const it = extremes(live, "idle_share", named, 1);
  if (!it) return "The share of time that a peer waits for others. No data yet.";
  const above = known(live, "idle_share").filter((peer) => peer.idle_share >= HEALTHY).length;
  const words = `Time spent waiting for others in the last 5 minutes: most ${it.name}, ${percent(it.value)}; median ${percent(it.middle)}.`;
  return above ? `${words} ${count(above, "peer")} above 10%.` : `${words} All healthy.`;
}

function lossWords(live, named, when) {
  const it = extremes(live, "train_loss", named, 1);
  return it ? `${when}: median ${loss(it.middle)}, highest ${loss(it.value)} at ${it.name}.` : "No loss yet.";
}

/** A peer that is paused or waits has no speed. */
function speedWords(live, named, when) {
  const training = known(live, "tokens_per_second").filter((peer) => peer.tokens_per_second > 0);
  const it = extremes(training, "tokens_per_second", named, -1);
  if (!it) return `Inner steps per second by peer. ${when}: no peer trains.`;
  return `Inner steps per second by peer. ${when}: median ${compact(it.middle)} tokens/s, slowest ${it.name} with ${compact(it.value)}.`;
}

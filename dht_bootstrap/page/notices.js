// Warnings at the top of the page; joins and departures at the bottom.

import { el, keyed, say, set, show } from "./dom.js";
import { list, moment, plain } from "./words.js";

const KINDS = {
  split: "Split swarm",
  clock: "Clock",
  straggler: "Slow peer",
  name: "A name of two",
  refused: "Refused",
  config: "Configuration",
  stuck: "Stuck",
};
const EVENTS = { joined: "joined", left: "left", lost: "was lost" };

/** Warnings of all runs, with the name of the run if there are several. */
export function drawWarnings(section, runs) {
  const warnings = runs.flatMap((run) => list(run.warnings).map((it) => ({ ...it, run: runs.length > 1 ? plain(run.run, 64) : "" })));
  show(section, warnings.length > 0);
  keyed(section.firstElementChild, warnings, (it) => `${it.run} ${it.kind} ${it.peer} ${it.text}`, () => {
    const item = el("li");
    item.append(el("strong"), el("bdi"));
    return item;
  }, (item, it) => {
    say(item.firstChild, `${KINDS[it.kind] ?? "Warning"}${it.run && ` in ${it.run}`}`);
    say(item.lastChild, plain(it.text, 600));
  });
}

/** Joins, departures and losses of a run, newest first. */
export function drawEvents(section, run) {
  const events = list(run?.events).toReversed();
  show(section, events.length > 0);
  keyed(section.querySelector("ol"), events, (it) => `${it.at} ${it.event} ${it.peer_id}`, () => {
    const item = el("li");
    item.append(el("time"), el("bdi"), el("span"));
    return item;
  }, (item, it) => {
    set(item, { class: it.event in EVENTS ? it.event : null });
    say(item.children[0], moment(it.at));
    say(item.children[1], plain(it.name, 64).trim() || `…${plain(it.peer_id).slice(-6)}`);
    say(item.children[2], EVENTS[it.event] ?? "changed");
  });
}

// The page: fetches the swarm every two seconds and draws it. Without an answer the old data stay, greyed.

import { el, keyed, say, set, show } from "./dom.js";
import { watch } from "./fetching.js";
import { drawContributors } from "./contributors.js";
import { drawJoin } from "./join.js";
import { drawEvents, drawWarnings } from "./notices.js";
import { RunView } from "./run.js";
import { count, duration, isolated, list, moment, number, plain, tail } from "./words.js";

const OLD = 30; // seconds after which the last reading of the directory counts as old
const at = (id) => document.getElementById(id);
const view = new RunView(at("run"));
let shown = null; // name of the run that is drawn
let data = null;
let heardAt = null; // performance.now() of the last good answer

function draw() {
  const runs = list(data.runs).filter((run) => run && typeof run === "object");
  const run = runs.find((it) => it.run === shown) ?? runs[0];
  shown = run?.run ?? null;
  const somebody = runs.some((it) => list(it.peers).length);
  show(at("run"), somebody);
  show(at("empty"), !somebody);
  drawTabs(runs);
  drawWarnings(at("warnings"), runs);
  drawEvents(at("events"), run);
  drawContributors(at("contributors"), data.contributors, run);
  drawJoin(at("addresses"), data, run, runs.length > 1);
  if (somebody) view.draw(run, data.contributors);
  const name = run ? plain(run.run, 64) : "";
  say(at("title"), runs.length === 1 ? name : "Swarm");
  document.title = somebody && number(run.ended_age) !== null ? `${name} · ended` : somebody ? `${name} · ${count(run.members, "peer")}` : "Swarm";
  const about = ["Bootstrap node ", tail(data.peer_id), `, version ${plain(data.version, 20)}, connected to `];
  say(at("about"), `${about.join("")}${count(data.connected_peers, "peer")}. Times are in your time zone.`);
}

function drawTabs(runs) {
  show(at("runs"), runs.length > 1);
  keyed(at("runs"), runs.length > 1 ? runs : [], (run) => String(run.run), (run) => {
    const button = el("button");
    set(button, { type: "button" });
    button.append(el("bdi"), el("span", "quiet"));
    button.addEventListener("click", () => {
      shown = run.run;
      draw();
    });
    return button;
  }, (button, run) => {
    set(button, { "aria-current": run.run === shown });
    say(button.firstChild, plain(run.run, 64) || "unnamed");
    say(button.lastChild, number(run.ended_age) === null ? ` ${count(run.members, "peer")}` : " ended");
  });
}

/** `state`: live, old, unread, gone or strange. */
function connection(state, text, trouble = "") {
  set(at("connection"), { "data-state": state });
  say(at("connection"), text);
  document.body.classList.toggle("stale", state !== "live");
  say(at("trouble"), trouble);
  show(at("trouble"), trouble !== "");
}

function heard(answer) {
  data = answer;
  heardAt = performance.now();
  draw();
  const age = number(data.read_age) ?? 0;
  if (age <= OLD) connection("live", "live");
  else connection("old", "old", `The directory of the swarm was last read ${duration(age)} ago, so this page is as old. The bootstrap node tries again.`);
}

const WORDS = {
  gone: ["no answer", "The bootstrap node does not answer. Peers train on without it. New peers wait until it is restarted with the same identity file, or join by any member's address."],
  unread: ["not read", "The bootstrap node cannot read the directory of the swarm"],
  strange: ["not understood", "This page does not understand the bootstrap node's answer. Reload the page; if that does not help, see the node's log"],
};

function unheard(trouble) {
  const [text, words] = WORDS[trouble.kind];
  const detail = trouble.kind === "gone" ? "" : `: ${isolated(plain(trouble.message, 300))}.`;
  const since = heardAt === null ? "" : ` The data below are from ${moment((Date.now() - performance.now() + heardAt) / 1000)}.`;
  connection(trouble.kind, text, `${words}${detail}${since} The page asks again every 2 seconds.`);
}

watch("swarm.json", heard, unheard);

// What each peer has given to a run, over all its restarts: it stays after the end of the run.

import { el, keyed, say, set, show } from "./dom.js";
import { compact, count, duration, integer, list, names, number } from "./words.js";

const ofAll = (given) => list(given).filter((it) => it && typeof it === "object");

/** Tokens that all contributors of the run have trained on, or null when nobody has contributed. */
export function givenTokens(given, run) {
  const tokens = number(ofAll(given).find((it) => it.run === run.run)?.tokens);
  return tokens > 0 ? tokens : null;
}

/** `given`: of all runs. Those of `run` are shown, or of the first run when none is there. */
export function drawContributors(section, given, run) {
  const all = ofAll(given);
  const found = run ? all.find((it) => it.run === run.run) : all[0];
  const peers = list(found?.peers).filter((peer) => peer && typeof peer === "object");
  show(section, peers.length > 0);
  if (!peers.length) return;
  const named = names(peers);
  const more = number(found.count) > peers.length ? `, ${integer(found.count - peers.length)} more without a row` : "";
  say(section.querySelector("header span"), `${compact(found.tokens)} tokens of ${count(number(found.count) ?? peers.length, "peer")}${more}`);
  keyed(section.querySelector("tbody"), peers, (peer) => String(peer.peer_id), makeRow, (row, peer) => {
    const [name, tokens, merges, seen] = row.children;
    say(name.firstChild, named.get(String(peer.peer_id)));
    say(tokens, compact(peer.tokens));
    say(merges, compact(peer.merges));
    say(seen, number(peer.age) < 60 ? "now" : `${duration(peer.age)} ago`);
  });
}

function makeRow(peer) {
  const row = el("tr");
  const name = el("th", "name");
  set(name, { scope: "row", title: String(peer.peer_id).slice(0, 80) });
  name.append(el("bdi"));
  row.append(name, el("td"), el("td"), el("td"));
  return row;
}

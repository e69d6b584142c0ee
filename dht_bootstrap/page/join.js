// How to join: the commands that start a peer of the run that is shown, the node's addresses, the run's configuration.

import { el, keyed, say, set } from "./dom.js";
import { list, number, plain } from "./words.js";

const LOOPBACK = /^\/ip4\/127\./;
const INNER = /^\/dns4\/[^./]+\//; // a host name that only containers beside the node know
const PRIVATE = /^\/ip4\/(127|10|192\.168|169\.254|172\.(1[6-9]|2\d|3[01]))\./;
const NAME = /^[A-Za-z0-9][\w.-]{0,63}$/; // of a run; anything else may not stand in a command

const WHERE = ["from another machine", "from another machine", "on this machine", "from a container beside the node; for others give it --announce"];
const near = (address) => (INNER.test(address) ? 3 : LOOPBACK.test(address) ? 2 : PRIVATE.test(address) ? 1 : 0);

/** Public addresses come first. `run` is one of `data.runs`; `several`: it is not the only one. */
export function drawJoin(place, data, run, several) {
  const found = list(data.addresses).map((address) => plain(address, 300));
  found.sort((a, b) => near(a) - near(b));
  const rows = found.length ? commands(found[0], data, run, several) : [];
  found.forEach((text, i) => rows.push({ text, what: "address", head: i ? "Or" : found.length > 1 ? "Its addresses" : "Its address" }));
  rows.push(...configuration(run));
  keyed(place, rows, (row) => row.text, copyable, (box, row) => {
    say(box.firstChild, row.head);
    say(box.querySelector("code"), row.text);
  });
}

function commands(address, data, run, several) {
  const ended = number(run?.ended_age) !== null;
  if (!run?.members || ended) {
    const head = ended ? "Nobody trains it any more: begin it again, with its configuration" : "Start the first peer, with a configuration of yours";
    return [{ text: `noloco-peer train --config FILE --initial-peers ${address}`, head }];
  }
  if (run.configuration?.own_program) return [{ text: `initial_peers="${address}"`, what: "setting", head: "These peers train by a program of their own: start it with" }];
  const named = several && NAME.test(run.run) ? ` --run ${run.run}` : "";
  const invited = data.invited === true || run.configuration?.run?.admission === "invite";
  const local = near(address) > 1; // out of reach for other machines
  const image = `noloco-peer:${plain(data.version, 20)} join ${address}${named}`;
  const volumes = invited ? `-v "$PWD/FILE:/invitation:ro" -v noloco:/data` : "-v noloco:/data";
  const rows = [{ text: `noloco-peer join ${address}${named}${invited ? " --invitation FILE" : ""}`, head: `Train with these peers ${WHERE[near(address)]}` }];
  const docker = { text: `docker run --init --stop-timeout 900 --hostname "$(hostname -s)" --gpus all ${volumes} ${image}${invited ? " --invitation /invitation" : ""}`, head: "The same in Docker; without a GPU leave out --gpus all" };
  return local ? rows : [...rows, docker];
}

/** JSON is YAML: the text is a file for `noloco-peer train --config`. */
function configuration(run) {
  const found = run?.configuration;
  if (!found?.run) return [];
  const agree = `as ${Number(found.agreeing)} of ${Number(run.members)} peers have it`;
  return [{ text: JSON.stringify({ run: found.run }), what: "configuration", head: `Its configuration ${plain(found.digest, 64)}, ${agree}` }];
}

function copyable({ text, what = "command" }) {
  const box = el("div", "copyable");
  const line = el("div", "line");
  const button = el("button", "copy", "Copy");
  const code = el("code");
  set(button, { type: "button", "aria-label": `Copy the ${what}` });
  set(code, { tabindex: 0 });
  button.addEventListener("click", async () => {
    say(button, (await copy(code)) ? "Copied" : "Press Ctrl+C");
    setTimeout(() => say(button, "Copy"), 2500);
  });
  line.append(code, button);
  box.append(el("p", "quiet"), line);
  return box;
}

/** Browsers give access to the clipboard only over https or on localhost: elsewhere the text is selected. */
async function copy(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(node);
    return document.execCommand("copy");
  }
}

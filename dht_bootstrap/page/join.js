// How to join: the command that starts a peer, and the addresses of this bootstrap node.

import { el, keyed, say, set } from "./dom.js";
import { list, plain } from "./words.js";

const PRIVATE = /^\/ip4\/(127|10|192\.168|169\.254|172\.(1[6-9]|2\d|3[01]))\./;
const command = (address) => `noloco-peer train --config configs/demo.yaml --initial-peers ${address}`;

/** Public addresses come first. */
export function drawJoin(place, addresses) {
  const found = list(addresses).map((address) => plain(address, 300));
  const near = (address) => (/^\/ip4\/127\./.test(address) ? 2 : PRIVATE.test(address) ? 1 : 0);
  found.sort((a, b) => near(a) - near(b));
  const rows = found.map((text, i) => ({ text, head: i ? "Or" : found.length > 1 ? "Its addresses" : "Its address" }));
  if (found.length) rows.unshift({ text: command(found[0]), head: "Start a peer with the run's configuration" });
  keyed(place, rows, (row) => row.text, copyable, (box, row) => {
    say(box.firstChild, row.head);
    say(box.querySelector("code"), row.text);
  });
}

function copyable({ text }) {
  const box = el("div", "copyable");
  const line = el("div", "line");
  const button = el("button", "copy", "Copy");
  const code = el("code");
  set(button, { type: "button", "aria-label": text.startsWith("/") ? "Copy the address" : "Copy the command" });
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

// Elements that are changed in place, so that nothing flickers and a selection survives an update. Text only: no HTML.

const SVG = "http://www.w3.org/2000/svg";

/** A new HTML element. */
export function el(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

/** A new SVG element. */
export function svg(tag, attributes = {}, parent = null) {
  const node = document.createElementNS(SVG, tag);
  set(node, attributes);
  parent?.append(node);
  return node;
}

/** Set the attributes that differ; null removes an attribute. */
export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

/** Set the text if it differs, so that a selection in it stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show or hide. */
export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

const known = new WeakMap(); // parent -> Map of key -> child

/**
 * Give `parent` one child per item, in order. `key(item)` identifies a child, `make(item)` makes a new one,
 * `update(child, item, index)` updates it.
 */
export function keyed(parent, items, key, make, update) {
  const before = known.get(parent) ?? new Map();
  const after = new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  items.forEach((item, index) => {
    const id = key(item);
    if (after.has(id)) return;
    const child = before.get(id) ?? make(item);
    after.set(id, child);
    update(child, item, index);
  });
  for (const [id, child] of before) if (!after.has(id)) child.remove();
  let place = parent.firstElementChild;
  for (const child of after.values()) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  known.set(parent, after);
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

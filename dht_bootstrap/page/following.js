// The peers that are highlighted in the charts, and their colours. A peer keeps its colour while it has one.

export const COLOURS = 8;

export class Following {
  #chosen = new Set();
  #slots = new Map(); // peer id -> 0 .. COLOURS - 1
  many = false; // more peers than colours: only chosen peers have one

  constructor(changed) {
    this.changed = changed;
  }

  get chosen() {
    return [...this.#chosen];
  }

  has(id) {
    return this.#chosen.has(id);
  }

  /** Peers that have a colour, in the order of colours. */
  get coloured() {
    return [...this.#slots].sort((a, b) => a[1] - b[1]).map(([id]) => id);
  }

  toggle(id) {
    if (!this.#chosen.delete(id)) {
      if (this.#chosen.size === COLOURS) this.#chosen.delete(this.chosen[0]);
      this.#chosen.add(id);
    }
    this.changed();
  }

  clear() {
    this.#chosen.clear();
    this.changed();
  }

  /** Set the present peers; call it before drawing. */
  see(ids) {
    const there = new Set(ids);
    for (const id of this.#chosen) if (!there.has(id)) this.#chosen.delete(id);
    this.many = ids.length > COLOURS;
    const wanted = this.many ? this.chosen : ids;
    for (const id of this.#slots.keys()) if (!wanted.includes(id)) this.#slots.delete(id);
    const taken = new Set(this.#slots.values());
    for (const id of wanted) {
      if (this.#slots.has(id)) continue;
      let slot = 0;
      while (taken.has(slot)) slot += 1;
      taken.add(slot);
      this.#slots.set(id, slot);
    }
  }

  /** Class names of a peer's line, dot or swatch. */
  look(id) {
    const slot = this.#slots.get(id);
    const muted = this.#chosen.size ? !this.#chosen.has(id) : this.many;
    return `${slot === undefined ? "plain" : `c${slot}`}${muted ? " muted" : ""}${this.#chosen.has(id) ? " chosen" : ""}`;
  }
}

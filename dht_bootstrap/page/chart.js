// A line chart in SVG: axes, a marked band, one line per peer, and the value under the pointer as text.

import { keyed, say, set, svg } from "./dom.js";
import { linear, ticks, timeTicks } from "./scale.js";
import { clock, date, integer, isolated, moment } from "./words.js";

const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };
const CROWD = 40; // more lines than this are paler
const NEAR = 40; // greatest distance in pixels at which the pointer selects a line

export class Chart {
  #drawn = [];
  #last = null;
  #pointer = null;

  /** `format`: text of a value; `tick`: text at the axis; `range(values, peaks)`: of the axis; `band`: {to, text} of healthy values. */
  constructor(figure, { format, range, tick: short = format, band = null }) {
    Object.assign(this, { format, range, short, band });
    this.plot = figure.querySelector(".plot");
    this.readout = figure.querySelector("output");
    this.caption = figure.querySelector("figcaption");
    this.picture = svg("svg", { role: "img", tabindex: "-1" }, this.plot);
    this.healthy = svg("rect", { class: "healthy" }, this.picture);
    this.grid = svg("g", { class: "axis" }, this.picture);
    this.below = svg("g", { class: "axis" }, this.picture);
    const clip = svg("clipPath", { id: `${figure.id}-clip` }, svg("defs", {}, this.picture));
    this.window = svg("rect", {}, clip);
    this.lines = svg("g", { class: "lines", "clip-path": `url(#${figure.id}-clip)` }, this.picture);
    this.words = svg("text", { class: "bandword" }, this.picture);
    this.empty = svg("text", { class: "none" }, this.picture);
    this.cursor = svg("circle", { class: "cursor", r: 5, visibility: "hidden" }, this.picture);
    new ResizeObserver(() => this.#last && this.draw(this.#last)).observe(this.plot);
    for (const kind of ["pointermove", "pointerdown"]) this.picture.addEventListener(kind, (event) => this.#point(event));
    this.picture.addEventListener("pointerleave", () => this.#point(null));
  }

  /** `lines`: [{id, name, look, points: [[x, y or null]]}], the last on top; `by`: "time" or "step"; `summary`: a sentence. */
  draw(data) {
    this.#last = data;
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (!width || !height) return;
    const points = data.lines.flatMap((line) => line.points.filter((point) => point[1] !== null));
    say(this.empty, points.length ? "" : "no data yet");
    set(this.empty, { x: width / 2, y: height / 2, "text-anchor": "middle" });
    const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const tops = peaks(data.lines);
    const [low, high] = this.range(points.map((point) => point[1]), tops);
    const cut = tops.some((top) => top > high) ? ` Values above ${this.format(high)} are cut off.` : "";
    set(this.picture, { width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": data.summary + cut });
    say(this.caption, data.summary + cut);
    const xs = points.map((point) => point[0]);
    const from = xs.reduce((a, b) => Math.min(a, b), xs[0] ?? 0);
    const to = Math.max(xs.reduce((a, b) => Math.max(a, b), from), from + (data.by === "time" ? 60 : 10));
    const x = linear(from, to, box.left, box.right);
    const y = linear(low, high, box.bottom, box.top);
    this.#axes(box, x, y, { low, high, from, to, by: data.by });
    this.#draw(data.lines, x, y);
    this.#show();
  }

  #axes(box, x, y, { low, high, from, to, by }) {
    const wide = box.right - box.left;
    set(this.window, { x: box.left, y: box.top - 3, width: wide + 8, height: box.bottom - box.top + 6 });
    keyed(this.grid, ticks(low, high, Math.floor((box.bottom - box.top) / 34)), String, () => tick(), (g, value) => {
      set(g.firstChild, { x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
      set(g.lastChild, { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" });
      say(g.lastChild, this.short(value));
    });
    const most = Math.max(2, Math.floor(wide / 84));
    const times = timeTicks(from, to, most);
    const stops = by === "time" ? times.found : ticks(from, to, most).filter(Number.isInteger);
    keyed(this.below, stops, String, () => tick(), (g, value) => {
      set(g.firstChild, { x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 4 });
      set(g.lastChild, { x: x(value), y: box.bottom + 18, "text-anchor": anchor(x(value), box) });
      say(g.lastChild, by === "time" ? day(value, times.step) : integer(value));
    });
    if (!this.band) return;
    const top = Math.max(box.top, y(this.band.to));
    set(this.healthy, { x: box.left, y: top, width: wide, height: box.bottom - top });
    set(this.words, { x: box.right - 8, y: top + 16, "text-anchor": "end" });
    say(this.words, this.band.text);
  }

  #draw(lines, x, y) {
    this.#drawn = lines.map((line) => ({ ...line, at: line.points.map(([px, py]) => [x(px), py === null ? null : y(py), px, py]) }));
    set(this.lines, { class: lines.length > CROWD ? "lines crowd" : "lines" });
    keyed(this.lines, this.#drawn, (line) => line.id, () => {
      const g = svg("g");
      svg("path", {}, g);
      svg("circle", { r: 2.6 }, g);
      return g;
    }, (g, line) => {
      set(g, { class: line.look });
      set(g.firstChild, { d: path(line.at) });
      const end = line.at.findLast((point) => point[1] !== null);
      set(g.lastChild, end ? { cx: end[0], cy: end[1], visibility: null } : { visibility: "hidden" });
    });
  }

  #point(event) {
    const corner = this.picture.getBoundingClientRect();
    this.#pointer = event && [event.clientX - corner.left, event.clientY - corner.top];
    this.#show();
  }

  /** Show the value under the pointer. */
  #show() {
    const near = this.#pointer && nearest(this.#drawn, this.#pointer);
    set(this.cursor, near ? { cx: near.point[0], cy: near.point[1], visibility: null } : { visibility: "hidden" });
    const by = this.#last?.by === "time" ? moment : (value) => `step ${integer(value)}`;
    say(this.readout, near ? `${isolated(near.line.name)} · ${by(near.point[2])} · ${this.format(near.point[3])}` : "");
  }
}

/** The largest value of each line with data. */
const peaks = (lines) =>
  lines.map((line) => line.points.reduce((most, [, y]) => (y === null ? most : Math.max(most, y)), -Infinity)).filter(Number.isFinite);

function tick() {
  const g = svg("g");
  svg("line", {}, g);
  svg("text", {}, g);
  return g;
}

const anchor = (at, box) => (at < box.left + 12 ? "start" : at > box.right - 20 ? "end" : "middle");

const day = (unix, step) => (step < 86400 ? clock(unix, step < 60) : date(unix));

/** A path that breaks where a value is missing. */
function path(points) {
  let d = "";
  let pen = "M";
  for (const [x, y] of points) {
    if (y === null) pen = "M";
    else {
      d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    }
  }
  return d || null;
}

function nearest(lines, [x, y]) {
  let best = null;
  let least = NEAR * NEAR;
  for (const line of lines) {
    for (const point of line.at) {
      if (point[1] === null) continue;
      const distance = (point[0] - x) ** 2 + (point[1] - y) ** 2;
      if (distance < least) [best, least] = [{ line, point }, distance];
    }
  }
  return best;
}

// A small line plot of the last two minutes, in SVG.

import { make } from "./dom.js";

const SPAN = 120_000;
const WIDTH = 200, HEIGHT = 56;

export class Plot {
  constructor(label, show, top = null) {
    Object.assign(this, { label, show, top, points: [] });
    this.value = make("b", {}, "–");
    this.area = make("path", { class: "area" });
    this.line = make("path", { class: "line" });
    const base = make("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
    this.svg = make("svg", box, base, this.area, this.line);
    this.element = make("figure", {}, make("figcaption", {}, label, this.value), this.svg);
  }

  add(now, value) {
    this.points.push([now, value]);
    while (this.points[0][0] < now - SPAN) this.points.shift();
    const most = Math.max(...this.points.map(([, y]) => y));
    const top = this.top ?? Math.max(1, most * 1.1);
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN)).toFixed(1);
    const y = (at) => (HEIGHT * (1 - at / top)).toFixed(1);
    const line = this.points.map(([at, each]) => `${x(at)},${y(each)}`).join("L");
    this.line.setAttribute("d", `M${line}`);
    this.area.setAttribute("d", `M${x(this.points[0][0])},${HEIGHT}L${line}L${WIDTH},${HEIGHT}Z`);
    this.value.textContent = this.show(value);
    this.svg.setAttribute("aria-label", `${this.label}: now ${this.show(value)}, at most ${this.show(most)}`);
  }
}

// A line chart: cross-hair, zoom by dragging, wheel or keys, linear and logarithmic axes.

const EDGE = { left: 58, right: 14, top: 12, bottom: 42 };

class Chart {
  /** `readout(texts)` hears of the cross-hair: one text for each series that is not behind others. */
  constructor({ label, readout }) {
    this.readout = readout;
    this.series = [];
    this.zoom = null; // [low, high] on the x axis; null: everything
    this.cross = null; // x of the cross-hair
    this.logX = false;
    this.logY = false;
    this.said = el("div", { class: "unseen", "aria-live": "polite" });
    this.frame = el("div", {
      class: "chart", tabindex: 0, role: "group", "aria-label":
        `${label}. Left and right move the cross-hair, plus and minus zoom, 0 shows everything.`,
    });
    this.node = el("div", {}, this.frame, this.said);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  /**
   * A series is {name, style, kind, marks, x, y, raw, std, band, behind}. `style` has its colour and dashes; `kind` is
   * a CSS class or null; `raw` is drawn faintly behind a smoothed y; `std` belongs to a mean y, and `band` draws
   * y - std to y + std. The cross-hair does not read series that are `behind`.
   */
  show(series, { xLabel, yLabel, logX, logY }) {
    Object.assign(this, { series, xLabel, yLabel, logX, logY });
    this.draw();
  }

  reset() {
    this.zoom = null;
    this.draw();
  }

  points() {
    const edges = (one) => (one.band ? [-1, 0, 1] : [0]);
    return this.series.flatMap((one) => edges(one).flatMap((side) => one.x.map((x, place) => [x,
      side ? one.y[place] + side * one.std[place] : one.y[place]]))).filter(
      ([x, y]) => y !== null && (!this.logX || x > 0) && (!this.logY || y > 0));
  }

  layout() {
    const width = this.frame.clientWidth;
    const height = width < 500 ? 260 : 360;
    const all = this.points();
    if (!width || !all.length) return null;
    const xs = all.map(([x]) => x);
    const range = this.zoom ?? [Math.min(...xs), Math.max(...xs)];
    const inside = all.filter(([x]) => x >= range[0] && x <= range[1]).map(([, y]) => y);
    const ys = inside.length ? inside : all.map(([, y]) => y);
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    const room = this.logY ? (high / low) ** 0.05 || 1.1 : (high - low) * 0.05 || Math.abs(high) || 1;
    [low, high] = this.logY ? [low / room, high * room] : [low - room, high + room];
    return {
      width, height, range,
      x: axis(range[0], range[1], EDGE.left, width - EDGE.right, this.logX),
      y: axis(low, high, height - EDGE.bottom, EDGE.top, this.logY),
    };
  }

  draw() {
    this.place = this.layout();
    if (this.place === null) {
      this.frame.replaceChildren(el("p", { class: "quiet" }, "Nothing to draw yet."));
      return;
    }
    const { width, height, x, y } = this.place;
    const clip = svg("clipPath", { id: "plot" }, svg("rect", {
      x: EDGE.left, y: EDGE.top, width: width - EDGE.left - EDGE.right,
      height: height - EDGE.top - EDGE.bottom,
    }));
    this.hair = svg("g", { class: "hair" });
    this.brush = svg("rect", { class: "brush", y: EDGE.top, height: height - EDGE.top - EDGE.bottom });
    this.frame.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`,
      "aria-hidden": true }, clip, this.axes(x, y, width, height),
    svg("g", { "clip-path": "url(#plot)" }, this.series.map((one) => this.line(one, x, y))),
    this.brush, this.hair));
    this.moveCross(this.cross);
  }

  axes(x, y, width, height) {
    const bottom = height - EDGE.bottom;
    const sparse = (ticks, most) => ticks.filter((_, n) => n % Math.ceil(ticks.length / most) === 0);
    return svg("g", { class: "axes" },
      y.ticks().map((tick) => svg("g", {},
        svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y.at(tick), y2: y.at(tick) }),
        svg("text", { x: EDGE.left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)))),
      sparse(x.ticks(), width / 70).map((tick) =>
        svg("text", { x: x.at(tick), y: bottom + 18, "text-anchor": "middle" }, short(tick))),
      svg("text", { x: width - EDGE.right, y: height - 6, "text-anchor": "end", class: "name" },
        this.xLabel),
      svg("text", { x: EDGE.left, y: height - 6, class: "name" }, `\u2191 ${this.yLabel}`));
  }

  line(one, x, y) {
    const path = (values) => {
      let pen = "M";
      return one.x.map((at, place) => {
        const value = values[place];
        if (value === null || (this.logX && at <= 0) || (this.logY && value <= 0)) {
          pen = "M";
          return "";
        }
        const step = `${pen}${x.at(at).toFixed(1)},${y.at(value).toFixed(1)}`;
        pen = "L";
        return step;
      }).join("");
    };
    const dots = one.marks && one.x.length <= 60 ? one.x.map((at, place) => (
      one.y[place] === null || (this.logX && at <= 0) || (this.logY && one.y[place] <= 0) ? null
        : svg("circle", { cx: x.at(at), cy: y.at(one.y[place]), r: 3 }))) : [];
    return svg("g", { class: `line run-${one.style.color} ${one.kind ?? ""}` },
      one.band ? svg("path", { class: "band", d: this.band(one, x, y) }) : null,
      one.raw && !one.behind ? svg("path", { class: "raw", d: path(one.raw) }) : null,
      svg("path", { d: path(one.y), "stroke-dasharray": one.style.dash }), dots);
  }

  /** The area from y - std to y + std. On a logarithmic axis, an edge at or below zero lies on the axis. */
  band(one, x, y) {
    const kept = one.x.map((_, place) => place).filter((place) => !this.logX || one.x[place] > 0);
    const floor = this.place.height - EDGE.bottom;
    const at = (place, side) => {
      const value = one.y[place] + side * one.std[place];
      return `${x.at(one.x[place]).toFixed(1)},${(this.logY && value <= 0 ? floor : y.at(value)).toFixed(1)}`;
    };
    const around = [...kept.map((place) => at(place, 1)), ...kept.reverse().map((place) => at(place, -1))];
    return around.length ? `M${around.join("L")}Z` : "";
  }

  /** The nearest x that any series has, or nothing. */
  nearest(x) {
    const [low, high] = this.place.range;
    let best = null;
    for (const one of this.series) {
      for (const at of one.x) {
        if (at >= low && at <= high && (best === null || Math.abs(at - x) < Math.abs(best - x))) best = at;
      }
    }
    return best;
  }

  moveCross(x) {
    this.cross = x;
    if (!this.hair) return;
    const { height, range } = this.place;
    const inside = x !== null && x >= range[0] && x <= range[1];
    this.hair.replaceChildren(...(inside ? [
      svg("line", { x1: this.place.x.at(x), x2: this.place.x.at(x), y1: EDGE.top, y2: height - EDGE.bottom }),
      svg("text", { x: this.place.x.at(x), y: height - EDGE.bottom + 34, "text-anchor": "middle" }, short(x, 6)),
    ] : []));
    this.readout(this.read().map((one) => (inside ? valueText(one, x) : "")));
  }

  /** The series that the cross-hair reads. */
  read() {
    return this.series.filter((one) => !one.behind);
  }

  /** Zoom by a factor about a value; the whole range is the widest. */
  zoomBy(factor, about) {
    const all = this.points().map(([x]) => x);
    const [least, most] = [Math.min(...all), Math.max(...all)];
    const [low, high] = this.place.range;
    const next = [about - (about - low) * factor, about + (high - about) * factor];
    this.zoom = next[0] <= least && next[1] >= most ? null
      : [Math.max(least, next[0]), Math.min(most, next[1])];
    this.draw();
  }

  listen() {
    const at = (event) => this.place.x.value(event.clientX - this.frame.getBoundingClientRect().left);
    let from = null;
    this.frame.addEventListener("pointermove", (event) => {
      if (!this.place) return;
      this.moveCross(this.nearest(at(event)));
      if (from === null) return;
      const [a, b] = [from, event.clientX - this.frame.getBoundingClientRect().left].sort((p, q) => p - q);
      this.brush.setAttribute("x", a);
      this.brush.setAttribute("width", b - a);
    });
    this.frame.addEventListener("pointerleave", () => from === null && this.moveCross(null));
    this.frame.addEventListener("pointerdown", (event) => {
      if (!this.place || event.button !== 0) return;
      from = event.clientX - this.frame.getBoundingClientRect().left;
      this.frame.setPointerCapture(event.pointerId);
    });
    this.frame.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const to = event.clientX - this.frame.getBoundingClientRect().left;
      const [low, high] = [from, to].sort((p, q) => p - q).map((place) => this.place.x.value(place));
      if (Math.abs(to - from) > 8) this.zoom = [low, high];
      from = null;
      this.draw();
    });
    this.frame.addEventListener("pointercancel", () => { from = null; this.draw(); });
    this.frame.addEventListener("dblclick", () => this.reset());
    this.frame.addEventListener("wheel", (event) => {
      // A page that is being scrolled past must not zoom: the chart has to be in use.
      if (!this.place || !(event.ctrlKey || document.activeElement === this.frame)) return;
      event.preventDefault();
      this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, at(event));
    }, { passive: false });
    this.frame.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.place || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.place.range;
    const here = this.cross ?? (low + high) / 2;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      this.moveCross(this.neighbour(here, event.key === "ArrowRight" ? 1 : -1));
      this.said.textContent = this.sentence();
    } else if (event.key === "+" || event.key === "=") this.zoomBy(0.7, here);
    else if (event.key === "-") this.zoomBy(1 / 0.7, here);
    else if (event.key === "0" || event.key === "Escape") this.reset();
    else return;
    event.preventDefault();
  }

  neighbour(x, direction) {
    const every = [...new Set(this.series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const [low, high] = this.place.range;
    const ahead = every.filter((at) => at >= low && at <= high && (at - x) * direction > 0);
    return (direction > 0 ? ahead[0] : ahead.at(-1)) ?? x;
  }

  sentence() {
    const values = this.read().map((one) => `${one.name} ${valueText(one, this.cross) || "\u2013"}`);
    return `${this.xLabel} ${short(this.cross, 6)}: ${values.join(", ")}`;
  }
}

/** The series' value at the place nearest to x, with its deviation; empty where x is outside its range. */
const valueText = (one, x) => {
  if (!one.x.length || x < one.x[0] || x > one.x.at(-1)) return "";
  let best = 0;
  one.x.forEach((at, place) => { if (Math.abs(at - x) < Math.abs(one.x[best] - x)) best = place; });
  return short(one.y[best]) + (one.std ? ` \u00b1 ${short(one.std[best], 2)}` : "");
};

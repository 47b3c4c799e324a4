// The tokens of a sample, as text or as patches over images: one tab stop, arrow keys move inside.

const HUES = 8; // evenly spread; beyond them come darker shades, then all of them again
const STRIDE = 3; // neighbours in number are far apart in colour

const paint = (node, expert) => {
  node.style.setProperty("--hue", String(((expert * STRIDE) % HUES) * (360 / HUES) + 20));
  node.style.setProperty("--shade", String(Math.floor(expert / HUES) % 3));
};

const chip = (expert, text, attributes = {}) => {
  const node = el("span", { class: "chip", ...attributes }, text ?? String(expert));
  paint(node, expert);
  return node;
};

const SIGNS = { " ": "space", "\u23ce": "end of line", "\u21e5": "tab" };

const spoken = (token) => SIGNS[token] ?? token;

class TokenGrid {
  /** `choose(token)` is called with the place of a chosen token. `attacked`: images to show beside, or null. */
  constructor({ sample, grid, attacked, choose }) {
    Object.assign(this, { sample, grid, attacked, choose });
    this.cells = [];
    this.node = el("div", {
      role: "listbox", tabindex: -1,
      "aria-label": sample.kind === "text" ? "Tokens, coloured by expert" : "Patches, coloured by expert",
      class: sample.kind === "text" ? `text ${sample.unit}` : `images${attacked ? " beside" : ""}`,
    });
    if (grid) this.node.style.setProperty("--columns", String(grid[1]));
    this.node.append(...(sample.kind === "text" ? this.text() : this.images()));
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("click", (event) => {
      const twin = event.target.closest(".twin");
      const place = twin ? Number(twin.dataset.place) : this.cells.indexOf(event.target.closest("[role=option]"));
      if (place >= 0) this.select(place);
    });
    this.focusable(0);
  }

  cell(place, content, attributes = {}) {
    const node = el("span", { role: "option", class: "token", id: `token-${place}`, tabindex: -1,
      "aria-selected": "false", ...attributes }, content);
    this.cells.push(node);
    return node;
  }

  text() {
    const breaks = new Set(this.sample.breaks);
    const gap = this.sample.unit === "words" ? " " : null;
    return this.sample.tokens.flatMap((token, place) =>
      [this.cell(place, token), breaks.has(place) ? el("br") : gap]).filter((part) => part !== null);
  }

  images() {
    const [rows, columns] = this.grid;
    let place = 0;
    return this.sample.images.map((image, number) => {
      const patches = el("div", { class: "patches", role: "presentation" });
      patches.style.setProperty("--columns", String(columns));
      for (let n = 0; n < rows * columns; n += 1, place += 1) patches.append(this.cell(place, ""));
      return el("div", { class: "image", role: "group", "aria-label": `image ${number + 1}, ${image.label}` },
        el("div", { class: "stage" }, el("img", { src: image.src, alt: "" }), patches),
        this.attacked ? attackedStage(this.attacked, number, this.grid) : null,
        el("div", { class: "caption" }, image.label,
          this.attacked ? `; after the attack: ${this.attacked.predicted[number]}` : null));
    });
  }

  /** Colour each token by its number in `experts`; `only` leaves the others without colour. `by` is "expert" or
   *  "cluster", what the numbers mean. */
  colour(experts, only, by) {
    this.cells.forEach((node, place) => {
      const expert = experts[place];
      const known = expert !== undefined && expert >= 0;
      node.classList.toggle("none", !known);
      node.classList.toggle("dim", only !== null && expert !== only);
      if (known) paint(node, expert);
      node.dataset.expert = known ? String(expert) : "";
      node.setAttribute("aria-label", `${this.name(place)}, ${known ? `${by} ${expert}` : `no ${by}`}`);
      node.title = known ? `${by} ${expert}` : "";
    });
  }

  name(place) {
    if (this.sample.kind === "text") return spoken(this.sample.tokens[place]);
    const { image, row, column } = patchPlace(place, this.grid);
    return `image ${image + 1}, row ${row + 1}, column ${column + 1}`;
  }

  mark(place) {
    this.cells.forEach((node, n) => node.setAttribute("aria-selected", String(n === place)));
    if (place !== null && this.cells[place]) this.focusable(place);
  }

  focusable(place) {
    this.cells.forEach((node) => { node.tabIndex = -1; });
    if (this.cells[place]) this.cells[place].tabIndex = 0;
  }

  select(place) {
    this.mark(place);
    this.cells[place].focus({ preventScroll: true });
    this.choose(place);
  }

  key(event) {
    const here = this.cells.indexOf(document.activeElement);
    if (here < 0) return;
    const steps = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: this.cells.length - 1 };
    let next = steps[event.key];
    if (event.key === "ArrowDown" || event.key === "ArrowUp") next = this.line(here, event.key === "ArrowDown");
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.select(here);
      return;
    }
    if (next === undefined) return;
    event.preventDefault();
    const place = Math.min(this.cells.length - 1, Math.max(0, next));
    this.focusable(place);
    this.cells[place].focus();
  }

  /** Return the cell of the next line above or below that is nearest in x. */
  line(here, down) {
    const from = this.cells[here].getBoundingClientRect();
    const away = (box) => (down ? box.top - from.bottom : from.top - box.bottom);
    let best = here;
    let least = [Infinity, Infinity];
    this.cells.forEach((node, place) => {
      const box = node.getBoundingClientRect();
      if (away(box) < -2) return;
      const score = [Math.round(away(box) / 8), Math.abs(box.left - from.left)];
      if (score[0] < least[0] || (score[0] === least[0] && score[1] < least[1])) [best, least] = [place, score];
    });
    return best;
  }
}

const patchPlace = (place, [rows, columns]) => {
  const inside = place % (rows * columns);
  return { image: Math.floor(place / (rows * columns)), row: Math.floor(inside / columns), column: inside % columns };
};

/** Return the patch of another grid that contains the centre of this one. */
const movedPatch = (place, from, to) => {
  const { image, row, column } = patchPlace(place, from);
  const [y, x] = [(row + 0.5) / from[0], (column + 0.5) / from[1]];
  return image * to[0] * to[1] + Math.floor(y * to[0]) * to[1] + Math.floor(x * to[1]);
};

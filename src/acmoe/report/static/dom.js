// Elements are built from text nodes and attributes only: nothing in the data is ever parsed as HTML.

const $ = (id) => document.getElementById(id);

const build = (create) => (tag, attributes = {}, ...children) => {
  const node = create(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
};

const el = build((tag) => document.createElement(tag));
const svg = build((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

/** A control with its label; the label's text stands before it. */
const labelled = (text, control, id) => {
  control.id = id;
  return el("div", { class: "field" }, el("label", { for: id }, text), control);
};

const checkbox = (text, id, checked, change) => {
  const box = el("input", { type: "checkbox", id, checked });
  box.addEventListener("change", () => change(box.checked));
  return el("div", { class: "field check" }, box, el("label", { for: id }, text));
};

const select = (text, id, options, chosen, change) => {
  const box = el("select", {}, options.map(([value, name]) => el("option", { value }, name)));
  box.value = chosen;
  box.addEventListener("change", () => change(box.value));
  return labelled(text, box, id);
};

/** A wide table scrolls inside its own frame, which the keyboard can reach. */
const framed = (label, table) =>
  el("div", { class: "frame", role: "region", tabindex: 0, "aria-label": label }, table);

/** A cell that also carries its column's name, for narrow screens where rows become cards. */
const cell = (label, ...children) => el("td", { "data-label": label }, el("span", {}, ...children));

/** A short piece of a run's line. */
const runMark = (index, thin = false) => lineMark(runStyles[index], thin);

const lineMark = ({ color, dash }, thin = false) =>
  svg("svg", { class: `mark run-${color}${thin ? " thin" : ""}`, viewBox: "0 0 24 10", "aria-hidden": true },
    svg("line", { x1: 1, y1: 5, x2: 23, y2: 5, "stroke-dasharray": dash }));

const DASHES = ["none", "7 3", "2 3", "9 3 2 3", "4 2", "12 4"];
let runStyles = []; // of each run: the number of its colour, and its dashes

/** Give each run a colour and dashes. Seeds of one configuration share the colour and differ in the dashes. */
const styleRuns = (data) => {
  runStyles = data.runs.map((_, index) => ({ color: index % 6, dash: DASHES[index % 6] }));
  if (!severalSeeds(data)) return;
  data.groups.forEach((group, place) => group.runs.forEach((index, seed) => {
    runStyles[index] = { color: place % 6, dash: DASHES[(Math.floor(place / 6) + seed) % 6] };
  }));
};

const severalSeeds = (data) => data.groups.some((group) => group.runs.length > 1);

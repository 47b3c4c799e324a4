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

const runMark = (index, thin = false) =>
  svg("svg", { class: `mark run-${index % 6}${thin ? " thin" : ""}`, viewBox: "0 0 24 10", "aria-hidden": true },
    svg("line", { x1: 1, y1: 5, x2: 23, y2: 5, "stroke-dasharray": DASHES[index % 6] }));

// With the colour, a run is told by its dashes.
const DASHES = ["none", "7 3", "2 3", "9 3 2 3", "4 2", "12 4"];

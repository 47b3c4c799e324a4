// Save a chart as SVG, its numbers as CSV, and the data of the whole page as JSON. Nothing is sent anywhere.

const save = (name, type, text) => {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
};

const fileName = (...parts) => ["acmoe", ...parts].join("-").replace(/[^A-Za-z0-9._]+/g, "-").toLowerCase();

/** Rows of values as RFC 4180 text; the first row names the columns. */
const csvText = (rows) => rows.map((row) => row.map((value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}).join(",")).join("\r\n") + "\r\n";

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** Buttons that save one chart. `node()` is the element to draw under `title()`, `rows()` the numbers behind it. */
const saveButtons = (what, { node, rows, title }) => {
  const id = fileName(what);
  const button = (kind, make) => el("button", { type: "button", id: `save-${id}-${kind}`,
    "aria-label": `Save ${what} as ${kind.toUpperCase()}`, onclick: make }, kind.toUpperCase());
  return el("div", { class: "save", role: "group", "aria-label": `Save ${what}` }, el("span", {}, "Save:"),
    node ? button("svg", () => save(`${id}.svg`, "image/svg+xml", svgText(node(), title?.() ?? capital(what)))) : null,
    button("csv", () => save(`${id}.csv`, "text/csv", csvText(rows()))));
};

const startExport = (data) => {
  $("save-json").addEventListener("click", () =>
    save("acmoe-report.json", "application/json", JSON.stringify(data())));
};

const ink = el("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
const inks = new Map();

/** Any CSS colour as [an rgb text that every viewer of SVG reads, its opacity]. */
const rgb = (color) => {
  if (!inks.has(color)) {
    ink.clearRect(0, 0, 1, 1);
    ink.fillStyle = color;
    ink.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = ink.getImageData(0, 0, 1, 1).data;
    inks.set(color, [`rgb(${r},${g},${b})`, a / 255]);
  }
  return inks.get(color);
};

const PAINTED = ["stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "font-family",
  "font-weight", "text-anchor"];

/** A copy of an SVG element whose styles no longer depend on this page. */
const frozen = (node) => {
  const copy = node.cloneNode(true);
  const copies = [copy, ...copy.querySelectorAll("*")];
  [node, ...node.querySelectorAll("*")].forEach((one, place) => {
    const style = getComputedStyle(one);
    for (const name of ["fill", "stroke"]) {
      const none = style[name] === "none";
      const [color, alpha] = none ? ["none", 1] : rgb(style[name]);
      copies[place].setAttribute(name, color);
      if (alpha < 1) copies[place].setAttribute(`${name}-opacity`, alpha.toFixed(3));
    }
    for (const name of PAINTED) copies[place].setAttribute(name, style.getPropertyValue(name));
    copies[place].removeAttribute("class");
  });
  return copy;
};

/** The pieces of a text node that each lie on one line, with their boxes. */
const linesOf = (text) => [...text.data.matchAll(/\S+/g)].map((word) => {
  const range = document.createRange();
  range.setStart(text, word.index);
  range.setEnd(text, word.index + word[0].length);
  return [word[0], range.getBoundingClientRect()];
});

/** Draw what an element shows (boxes, images, texts and inner SVG) as one SVG with a title and a ground. */
const svgText = (root, title) => {
  const MARGIN = 12;
  const HEAD = 34;
  const parts = [];
  const boxes = [];
  const origin = root.getBoundingClientRect();
  const at = (box) => ({ x: box.left - origin.left, y: box.top - origin.top, width: box.width, height: box.height });
  const add = (node, box) => { parts.push(node); boxes.push(box); };
  const walk = (node, fade) => {
    if (node.nodeType === Node.TEXT_NODE) {
      const style = getComputedStyle(node.parentElement);
      const [fill, alpha] = rgb(style.color);
      for (const [word, box] of linesOf(node)) {
        const place = at(box);
        if (box.width) add(svg("text", { x: place.x.toFixed(1), y: (place.y + 0.76 * place.height).toFixed(1), fill,
          opacity: (alpha * fade).toFixed(3), "font-size": style.fontSize, "font-family": style.fontFamily,
          "font-weight": style.fontWeight }, word), place);
      }
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE || !node.getClientRects().length || node.matches(".unseen, .save")) return;
    const style = getComputedStyle(node);
    const faded = fade * Number(style.opacity);
    const place = at(node.getBoundingClientRect());
    const size = { x: place.x.toFixed(1), y: place.y.toFixed(1), width: place.width.toFixed(1),
      height: place.height.toFixed(1) };
    if (node instanceof SVGSVGElement) {
      const copy = frozen(node);
      for (const [name, value] of Object.entries(size)) copy.setAttribute(name, value);
      add(copy, place);
      return;
    }
    const [fill, alpha] = rgb(style.backgroundColor);
    if (alpha > 0 && node !== root) {
      add(svg("rect", { ...size, fill, "fill-opacity": (alpha * faded).toFixed(3),
        rx: parseFloat(style.borderRadius) || 0 }), place);
    }
    if (node instanceof HTMLImageElement) add(svg("image", { ...size, href: node.src }), place);
    for (const child of node.childNodes) walk(child, faded);
  };
  walk(root, 1);
  const right = Math.max(200, ...boxes.map((box) => box.x + box.width));
  const bottom = Math.max(0, ...boxes.map((box) => box.y + box.height));
  const page = getComputedStyle(document.body);
  const [width, height] = [Math.ceil(right + 2 * MARGIN), Math.ceil(bottom + HEAD + MARGIN)];
  const made = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
    svg("title", {}, title),
    svg("rect", { width, height, fill: rgb(page.backgroundColor)[0] }),
    svg("text", { x: MARGIN, y: 22, fill: rgb(page.color)[0], "font-size": 14, "font-weight": 600,
      "font-family": page.fontFamily }, title),
    svg("g", { transform: `translate(${MARGIN} ${HEAD})` }, parts));
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(made)}\n`;
};

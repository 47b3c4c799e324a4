// One expert of the explorer's layer: how many tokens it received, and those it weighs most.

const renderExperts = (data) => {
  const { run, layer: depth } = explorerView;
  if (run === null) {
    $("experts-body").replaceChildren(
      el("p", {}, "No run has a checkpoint that can be read here; the notes above say why."));
    return;
  }
  const { name, routing } = data.runs[run];
  if (routing.by_expert === null) {
    $("experts-body").replaceChildren(el("p", {}, `The routing of ${name} was written by an earlier version of acmoe, `
      + "without the tokens of each expert. Run acmoe analyze --hf again to see them here."));
    return;
  }
  const found = routing.by_expert[depth];
  const sample = data.samples[routing.sample];
  explorerView.expert = Math.min(explorerView.expert, found.got.length - 1);
  const pick = (expert) => () => {
    explorerView.expert = expert;
    renderExperts(data);
    keepLink(data, "expert");
    $(`pick-${expert}`).focus();
  };
  $("experts-body").replaceChildren(
    el("p", { class: "quiet" }, `${name}, MoE layer ${depth + 1}. Run and layer are those of the explorer above. `
      + "Choose an expert:"),
    el("div", { class: "legend", role: "group", "aria-label": "Expert to show" }, found.got.map((count, expert) => {
      const button = el("button", { type: "button", class: "chip", id: `pick-${expert}`, onclick: pick(expert),
        "aria-pressed": String(expert === explorerView.expert) }, `expert ${expert}`,
      el("span", { class: "share" }, whole(count)));
      paint(button, expert);
      return button;
    })),
    ...expertPage(data, found, sample, explorerView.expert));
};

const expertPage = (data, found, sample, expert) => {
  const { layer: depth, run } = explorerView;
  const { routing } = data.runs[run];
  const layer = routing.layers[depth];
  const list = sample.kind === "text"
    ? found.top[expert].map((example) => textExample(data, layer, example))
    : found.top[expert].map((example) => patchExample(data, sample, layer, example));
  return [
    el("h3", {}, `Expert ${expert} of MoE layer ${depth + 1}`),
    el("p", {}, expertCounts(found, sample, routing, layer, expert)),
    found.frequent?.[expert].length ? el("p", {}, "Most frequent: ", found.frequent[expert].map(([text, count]) =>
      [el("span", { class: "glyph" }, SIGNS[text] ? spoken(text) : text), ` ${whole(count)} `])) : null,
    list.length ? el("p", { class: "quiet" }, rankedBy(found, sample, routing, list.length)) : null,
    el(sample.kind === "text" ? "ol" : "div", { class: `examples ${sample.kind}`, id: "experts-top" }, list),
    saveButtons(`expert ${expert} of layer ${depth + 1}, ${data.runs[run].name}`,
      { rows: () => expertRows(found, expert) }),
  ].filter((part) => part !== null);
};

const expertCounts = (found, sample, routing, layer, expert) => {
  const unit = sample.kind === "text" ? sample.unit : "patches";
  const share = (count) => `${fixed((100 * count) / found.total, 1)}%`;
  const first = found.first[expert];
  const over = `of ${whole(found.total)} ${unit} (${routing.measured})`;
  if (routing.soft) {
    return `In SoftMoE every expert reads a weighted mean of all patches. For ${whole(first)} ${over} this expert has `
      + `the largest weight in the output (${share(first)}). Its dispatch weights, which say how much it reads of each `
      + "patch, are not recorded.";
  }
  const chosen = layer.ids[0]?.length ?? 1;
  const each = chosen === 1 ? "one expert" : `${chosen} experts`;
  return `It received ${whole(found.got[expert])} ${over}, ${share(found.got[expert])}; for ${whole(first)} it was the `
    + `first choice. The router sends each to ${each}; an even split would give every expert `
    + `${fixed((100 * chosen) / found.got.length, 1)}%.`;
};

const rankedBy = (found, sample, routing, count) => {
  const unit = sample.kind === "text" ? sample.unit : "patches";
  const where = sample.kind === "text" ? `all measured ${unit}` : `all ${unit} of the ${sample.images.length} images shown`;
  const why = found.ranked === "gate"
    ? `with the highest ${routing.soft ? "combine weight" : "gate"}, which is the weight of this expert in the output`
    : "with the highest affinity to this expert, which is the router's score; the gates are unknown, or all the same";
  return `Below are the ${count} ${unit}, out of ${where}, ${why}. Click one to open it in the explorer.`;
};

const textExample = (data, layer, [place, value, before, text, after]) => {
  const shown = place < layer.first.length;
  const name = SIGNS[text] ?? text;
  const drawn = text === " " ? "\u2423" : text; // an open box, the sign for a blank
  const token = shown ? el("a", { href: linkTo(data, { token: place }), class: "glyph", "aria-label":
    `${name}, position ${place + 1}, show it in the explorer` }, drawn) : el("span", { class: "glyph" }, drawn);
  return el("li", {}, el("span", { class: "value" }, fixed(value, 3)),
    el("span", { class: "context" }, before, token, after));
};

/** The patch with one patch around it, cut out of its image. */
const patchExample = (data, sample, layer, [place, value]) => {
  const { image, row, column } = patchPlace(place, layer.grid);
  const [rows, columns] = layer.grid;
  const box = [Math.max(0, column - 1), Math.max(0, row - 1)];
  const size = [Math.min(3, columns - box[0]), Math.min(3, rows - box[1])];
  const label = `image ${image + 1} (${sample.images[image].label}), row ${row + 1}, column ${column + 1}`;
  const said = `${label}, value ${fixed(value, 3)}, show it in the explorer`;
  return el("a", { href: linkTo(data, { token: place }), class: "patch", "aria-label": said, title: label },
  svg("svg", { viewBox: `${box[0]} ${box[1]} ${size[0]} ${size[1]}`, "aria-hidden": true },
    svg("image", { href: sample.images[image].src, width: columns, height: rows, preserveAspectRatio: "none" }),
    svg("rect", { x: column + 0.04, y: row + 0.04, width: 0.92, height: 0.92 })),
  el("span", {}, fixed(value, 3)));
};

const expertRows = (found, expert) => [
  ["position", found.ranked, ...(found.frequent ? ["before", "token", "after"] : [])],
  ...found.top[expert].map(([place, ...rest]) => [place + 1, ...rest]),
];

// One token at one layer: its experts, the router's scores, its cluster, and its experts in the other runs.

const block = (title, ...content) => el("div", { class: "block" }, el("h4", {}, title), ...content);

const bars = (rows) => {
  const most = Math.max(...rows.map((row) => Math.abs(row.value)), 1e-9);
  const negative = rows.some((row) => row.value < 0);
  return el("ol", { class: `bars${negative ? " both" : ""}` }, rows.map((row) => {
    const fill = el("span", { class: "fill" });
    const length = (Math.abs(row.value) / most) * (negative ? 50 : 100);
    fill.style.width = `${length}%`;
    fill.style.left = negative ? `${row.value < 0 ? 50 - length : 50}%` : "0";
    if (row.expert !== undefined) paint(fill, row.expert);
    return el("li", { class: row.chosen ? "chosen" : null },
      el("span", { class: "key" }, row.key), el("span", { class: "track" }, fill),
      el("span", { class: "value" }, row.text));
  }));
};

const tokenHeading = (sample, routing, layer, token) => {
  if (sample.kind === "text") {
    const text = sample.tokens[token];
    return el("h3", {}, el("span", { class: "glyph" }, SIGNS[text] ? spoken(text) : text),
      el("span", { class: "quiet" },
        ` ${sample.unit.replace(/s$/, "")} ${token + 1} of ${sample.tokens.length}`));
  }
  const { image, row, column } = patchPlace(token, layer.grid);
  return el("h3", {}, `Image ${image + 1}: ${sample.images[image].label}`,
    el("span", { class: "quiet" },
      ` row ${row + 1}, column ${column + 1}; classified as ${routing.predicted[image]}`));
};

/** The experts that process the token, each a link to its page, with the weight of its output. */
const wentTo = (data, routing, layer, token) => el("p", { class: "went" },
  routing.soft ? "Largest share in its output: " : "Sent to: ",
  layer.ids[token].map((expert, place) => (expert < layer.experts
    ? [expertLink(data, expert), layer.gate[token][place] === null ? " "
      : ` ${routing.soft ? "combine weight" : "gate"} ${fixed(layer.gate[token][place], 3)} `]
    : el("span", { class: "quiet" }, "no expert "))));

const expertLink = (data, expert) => {
  const link = el("a", { class: "chip", href: linkTo(data, { expert }, "expert"),
    title: `what expert ${expert} receives` }, `expert ${expert}`);
  paint(link, expert);
  return link;
};

/** A bar chart in the details, with buttons that save it. */
const chartBlock = (title, what, chart, rows, ...notes) =>
  block(title, ...notes, chart, saveButtons(what, { node: () => chart, rows: () => rows }));

const affinities = (layer, token) => {
  const chosen = new Set(layer.ids[token]);
  return bars(layer.affinity[token].map((value, expert) => ({
    key: `expert ${expert}`, value, text: fixed(value, 3), expert, chosen: chosen.has(expert),
  })));
};

const affinityBlock = (layer, token) => chartBlock("Affinities", `affinities of token ${token + 1}`,
  affinities(layer, token), [["expert", "affinity", "chosen"], ...layer.affinity[token].map((value, expert) =>
    [expert, value, layer.ids[token].includes(expert)])],
  el("p", { class: "quiet" }, "The router's score of the token for each expert; bold: chosen."));

const clusterBlock = (layer, depth, token) => {
  const cluster = layer.cluster[token];
  if (cluster < 0) {
    const first = depth === 0 || layer.adaptive; // deeper, adaptive and without: a stage of new tokens
    const why = first ? "None yet: no earlier MoE layer has routed this token." : "None: this router is not adaptive.";
    return block("Cluster", el("p", {}, `${why} The router reads the token without rescaling (M = I).`));
  }
  const size = layer.cluster.filter((other) => other === cluster).length;
  const said = el("p", {}, chip(cluster, `cluster ${cluster}`),
    ` Its first expert at the MoE layer before. ${size} of the ${layer.cluster.length} shown are in this cluster.`);
  const stretched = layer.stretched[cluster];
  if (!layer.adaptive || !stretched.length) {
    return block("Cluster", said, el("p", { class: "quiet" }, "This router does not rescale features (M = I)."));
  }
  return el("div", {}, block("Cluster", said), chartBlock("Most stretched features", `features of cluster ${cluster}`,
    bars(stretched.map(([feature, scale]) => (
      { key: `feature ${feature}`, value: scale, text: `\u00d7 ${fixed(scale, 2)}` }))),
    [["cluster", "feature", "scale"], ...stretched.map(([feature, scale]) => [cluster, feature, scale])],
    el("p", { class: "quiet" }, "Before scoring, the router multiplies each feature by M. These are the largest "
      + `factors of ${layer.features}, whose mean is 1`
      + `${layer.varies ? "; each is a mean over the cluster's tokens" : ""}.`)));
};

/** The token's experts in the runs with the same sample, and how many of its companions it has in both. */
const elsewhere = (data, chosen, depth, token) => {
  const own = data.runs[chosen].routing;
  const here = own.layers[depth];
  const rows = data.runs.map((run, index) => {
    if (index === chosen || run.routing === null || run.routing.sample !== own.sample) return null;
    const there = run.routing.layers[depth];
    if (!there || String(there.grid) !== String(here.grid) || token >= there.first.length) return null;
    const count = Math.min(here.first.length, there.first.length);
    const mates = [...Array(count).keys()].filter((n) => n !== token && here.first[n] === here.first[token]);
    const alike = (n) => there.first[n] === there.first[token];
    const kept = mates.filter(alike).length;
    const all = [...Array(count).keys()].filter((n) => n !== token && alike(n)).length;
    const share = (part, whole_) => (whole_ ? `${((100 * part) / whole_).toFixed(0)}%` : "none");
    return el("li", {}, el("strong", {}, run.name), " ", there.ids[token].filter((e) => e < there.experts)
      .map((expert) => [chip(expert, `expert ${expert}`), " "]),
    el("span", { class: "quiet" }, `${mates.length} other tokens have the same first expert in this run. `
      + `${kept} of them (${share(kept, mates.length)}) share one with it in ${run.name} too; of all tokens `
      + `${share(all, count - 1)} do.`));
  }).filter((row) => row !== null);
  const note = el("p", { class: "quiet" }, "Numbers of experts do not carry over: expert 3 of one run is not expert 3 "
    + "of another.");
  return rows.length ? block("In the other runs", note, el("ul", { class: "plain" }, rows)) : null;
};

const pathBlock = (routing, depth, token, go) => block("First expert at each MoE layer", el("p", { class: "path" },
  routing.layers.map((layer, n) => {
    const place = layer.grid === null || String(layer.grid) === String(routing.layers[depth].grid)
      ? token : movedPatch(token, routing.layers[depth].grid, layer.grid);
    const step = el("button", { type: "button", class: "chip", "aria-current": n === depth ? "step" : null,
      "aria-label": `layer ${n + 1}: expert ${layer.first[place]}`, onclick: () => go(n) }, String(layer.first[place]));
    paint(step, layer.first[place]);
    return step;
  })));

const tokenDetails = (data, chosen, depth, token, go) => {
  const { routing } = data.runs[chosen];
  const layer = routing.layers[depth];
  return [
    tokenHeading(data.samples[routing.sample], routing, layer, token),
    wentTo(data, routing, layer, token),
    attackedBlock(routing, depth, token),
    affinityBlock(layer, token),
    clusterBlock(layer, depth, token),
    pathBlock(routing, depth, token, go),
    elsewhere(data, chosen, depth, token),
  ].filter((part) => part !== null);
};

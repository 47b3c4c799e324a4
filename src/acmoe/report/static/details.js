// What is known of one token at one layer, and where it went in the other runs.

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
      ` row ${row + 1}, column ${column + 1}; taken for ${routing.predicted[image]}`));
};

const wentTo = (layer, token) => el("p", { class: "went" }, layer.ids[token].map((expert, place) =>
  expert < layer.experts
    ? [chip(expert, `expert ${expert}`), layer.gate[token][place] === null ? " "
      : ` gate ${fixed(layer.gate[token][place], 3)} `]
    : el("span", { class: "quiet" }, "no expert ")));

const affinities = (layer, token) => {
  const chosen = new Set(layer.ids[token]);
  return bars(layer.affinity[token].map((value, expert) => ({
    key: `expert ${expert}`, value, text: fixed(value, 3), expert, chosen: chosen.has(expert),
  })));
};

const clusterBlock = (layer, depth, token) => {
  const cluster = layer.cluster[token];
  if (cluster < 0) {
    const first = depth === 0 || layer.adaptive; // deeper, adaptive and without: a stage of new tokens
    const why = first ? "None yet: no MoE layer has routed these tokens before." : "None: a plain router.";
    return block("Cluster", el("p", {}, `${why} The token is read as it is (M = I).`));
  }
  const size = layer.cluster.filter((other) => other === cluster).length;
  const said = el("p", {}, chip(cluster, `cluster ${cluster}`),
    ` its first choice at the MoE layer before; ${size} of the ${layer.cluster.length} shown are in it.`);
  const stretched = layer.stretched[cluster];
  if (!layer.adaptive || !stretched.length) {
    return block("Cluster", said, el("p", { class: "quiet" }, "This router does not stretch: M = I."));
  }
  return el("div", {}, block("Cluster", said), block("Most stretched features",
    bars(stretched.map(([feature, scale]) => (
      { key: `feature ${feature}`, value: scale, text: `\u00d7 ${fixed(scale, 2)}` }))),
    el("p", { class: "quiet" }, `of ${layer.features}; the mean over features is 1`
      + `${layer.varies ? "; mean over the cluster's tokens" : ""}.`)));
};

/** Where it went in a run that read the same sample, and who went with it in both. */
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
    el("span", { class: "quiet" }, `Of the ${mates.length} others with its first expert here, ${kept} `
      + `(${share(kept, mates.length)}) are with it there; of all tokens ${share(all, count - 1)} are.`));
  }).filter((row) => row !== null);
  return rows.length ? block("In the other runs", el("ul", { class: "plain" }, rows)) : null;
};

const pathBlock = (routing, depth, token, go) => block("Through the layers", el("p", { class: "path" },
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
    wentTo(layer, token),
    block("Affinities", affinities(layer, token)),
    clusterBlock(layer, depth, token),
    pathBlock(routing, depth, token, go),
    elsewhere(data, chosen, depth, token),
  ].filter((part) => part !== null);
};

// The routing explorer: a run, a layer, its tokens coloured by expert, one of them in detail.

const NEW_VIEW = { run: null, layer: 1, token: 4, expert: 0, by: "expert" }; // without a link
const explorerView = { ...NEW_VIEW, numbers: false, beside: true, only: null, grid: null };

const runName = ({ name, router }) => (name.includes(router) ? name : `${name} (${router})`);

const renderExplorer = (data) => {
  const able = data.runs.map((_, index) => index).filter((index) => data.runs[index].routing !== null);
  if (!able.includes(explorerView.run)) explorerView.run = startRun(data);
  if (!able.length) {
    $("explorer-body").replaceChildren(
      el("p", {}, "No run has a checkpoint that can be read here; the notes above say why."));
    renderExperts(data);
    return;
  }
  const tokens = el("div", { id: "explorer-tokens" });
  const legend = el("div", { class: "legend", id: "explorer-legend", role: "group", "aria-label":
    "Experts: choose one to see its tokens alone" });
  const details = el("aside", { id: "explorer-details", class: "details", "aria-label": "The chosen token" });
  const said = el("p", { class: "unseen", role: "status" });
  const slider = el("input", { type: "range", min: 1, step: 1 });
  const sliderText = el("output", { for: "explorer-layer", id: "explorer-layer-name" });
  const about = el("div", { class: "quiet", id: "explorer-about" });
  const parts = { data, tokens, legend, details, said, slider, sliderText, about };
  slider.addEventListener("input", () => showLayer(parts, Number(slider.value) - 1));
  slider.addEventListener("change", () => keepLink(data));
  const set = (name, value) => { explorerView[name] = value; showLayer(parts, explorerView.layer); keepLink(data); };
  const rebuild = (name) => (value) => { explorerView.grid = null; set(name, value); };
  $("explorer-body").replaceChildren(
    el("div", { class: "controls" },
      select("Run", "explorer-run", able.map((index) => [String(index), runName(data.runs[index])]),
        String(explorerView.run), (value) => rebuild("run")(Number(value))),
      el("div", { class: "field wide" }, el("label", { for: "explorer-layer" }, "MoE layer"), slider, sliderText),
      select("Colour by", "explorer-by", [["expert", "first expert at this layer"],
        ["cluster", "first expert one MoE layer earlier"]], explorerView.by, (value) => set("by", value)),
      checkbox("Show numbers", "explorer-numbers", explorerView.numbers, (value) => set("numbers", value)),
      able.some((index) => isAttacked(data.runs[index].routing))
        ? checkbox("Show attacked images", "explorer-beside", explorerView.beside, rebuild("beside")) : null),
    about, legend, said, el("div", { class: "explore" }, el("div", {}, tokens,
      saveButtons("the explorer", { node: () => tokens.firstElementChild, rows: () => layerRows(data),
        title: () => `${data.runs[explorerView.run].name}, MoE layer ${explorerView.layer + 1}: ${explorerView.by} of `
          + "each token" })), details),
    ...withoutRouting(data));
  slider.id = "explorer-layer";
  explorerView.grid = null;
  showLayer(parts, explorerView.layer);
};

const isAttacked = (routing) => routing.attacked !== null && typeof routing.attacked !== "string";

/** Say here too why a run cannot be chosen. */
const withoutRouting = (data) => data.runs.filter((run) => run.routing === null).map((run) => {
  const why = run.notes.find((note) => note.startsWith("no routing: "))?.slice("no routing: ".length);
  return el("p", { class: "quiet" }, `${run.name} is not shown here: ${why ?? "it has no routing"}`);
});

/** Draw one layer; the tokens themselves are built again only where they are others. */
const showLayer = (parts, wanted) => {
  const { data, tokens, slider, sliderText, about } = parts;
  const { routing } = data.runs[explorerView.run];
  const before = explorerView.grid;
  const depth = Math.min(Math.max(wanted, 0), routing.layers.length - 1);
  const layer = routing.layers[depth];
  const sample = data.samples[routing.sample];
  slider.max = String(routing.layers.length);
  slider.value = String(depth + 1);
  sliderText.textContent = `${depth + 1} of ${routing.layers.length}, ${layer.adaptive ? "adaptive" : "plain"} router`;
  explorerView.layer = depth;
  about.replaceChildren(...aboutSample(data, depth).map((text) => el("p", {}, text)));
  if (before === null || before.sample !== sample || String(before.grid) !== String(layer.grid)) {
    if (before?.grid && layer.grid && explorerView.token !== null) {
      explorerView.token = movedPatch(explorerView.token, before.grid, layer.grid);
    }
    const attacked = explorerView.beside && isAttacked(routing) ? routing.attacked : null;
    explorerView.grid = new TokenGrid({ sample, grid: layer.grid, attacked, choose: (token) => {
      explorerView.token = token;
      showDetails(parts);
      parts.said.textContent = chosenSentence(data);
      keepLink(data);
    } });
    tokens.replaceChildren(explorerView.grid.node);
  }
  explorerView.grid.node.classList.toggle("numbered", explorerView.numbers);
  paintTokens(parts);
  showDetails(parts);
  renderExperts(data);
};

/** Also names the run and the layer: on paper the controls are gone. */
const aboutSample = (data, depth) => {
  const run = data.runs[explorerView.run];
  const { routing } = run;
  const sample = data.samples[routing.sample];
  const count = routing.layers[depth].first.length;
  const one = sample.kind === "text" ? sample.unit.replace(/s$/, "") : "patch";
  const what = sample.kind === "text" ? sample.unit : `patches of ${sample.images.length} images`;
  const colour = explorerView.by === "expert" ? `the expert that the router of this layer puts first for it`
    : "its cluster: the expert that was its first choice at the MoE layer before, from which its scaling M is computed";
  return [
    `${run.name}, MoE layer ${depth + 1}: ${whole(count)} ${what} of ${sample.title}`
      + `${routing.step === null ? "" : `, routed by the checkpoint of step ${whole(routing.step)}`}`
      + `${routing.statistics === "none" ? "" : ` with ${routing.statistics} statistics`}. `
      + `The colour of a ${one} shows ${colour}. Choose a ${one} to see its scores for all experts: click, or move `
      + "with the arrow keys and press Enter.",
    routing.soft ? "SoftMoE has no hard choice: every expert reads a weighted mean of all patches. The colour shows "
      + "the expert with the largest combine weight, its share in the output of the patch." : null,
    sample.kind === "images" ? aboutAttack(routing, depth) : null,
  ].filter((text) => text !== null);
};

const paintTokens = (parts) => {
  const { routing } = parts.data.runs[explorerView.run];
  const layer = routing.layers[explorerView.layer];
  const values = explorerView.by === "expert" ? layer.first : layer.cluster;
  if (explorerView.only !== null && explorerView.only >= layer.experts) explorerView.only = null;
  explorerView.grid.colour(values, explorerView.only, explorerView.by);
  explorerView.grid.mark(explorerView.token);
  if (explorerView.grid.attacked) {
    colourTwins(explorerView.grid.node, routing.attacked.layers[explorerView.layer], layer, explorerView.only);
  }
  const toggle = (expert) => () => {
    explorerView.only = explorerView.only === expert ? null : expert;
    paintTokens(parts);
    $(`expert-${expert}`).focus();
  };
  const known = values.filter((value) => value >= 0).length;
  parts.legend.replaceChildren(...[...Array(layer.experts).keys()].map((expert) => {
    const share = values.filter((value) => value === expert).length / Math.max(1, known);
    const button = el("button", { type: "button", id: `expert-${expert}`, class: "chip", "aria-pressed":
      String(explorerView.only === expert), title: `show only ${explorerView.by} ${expert}`, onclick: toggle(expert) },
    `${expert}`, el("span", { class: "share" }, `${(100 * share).toFixed(0)}%`));
    paint(button, expert);
    return button;
  }));
};

const chosenSentence = (data) => {
  const { run, layer: depth, token, grid } = explorerView;
  const layer = data.runs[run].routing.layers[depth];
  return `${grid.name(token)}: first expert ${layer.first[token]} at MoE layer ${depth + 1}`;
};

const showDetails = (parts) => {
  const { data, details } = parts;
  const { run, layer, token } = explorerView;
  const shown = data.runs[run].routing.layers[layer];
  if (token === null || token >= shown.first.length) {
    details.replaceChildren(el("p", { class: "quiet" }, "Choose a token to see the router's scores for it, its "
      + "cluster, the features that M enlarges most for that cluster, and its experts in the other runs."));
    return;
  }
  const go = (depth) => {
    showLayer(parts, depth);
    keepLink(data);
    details.querySelectorAll(".path button")[depth]?.focus();
  };
  details.replaceChildren(...tokenDetails(data, run, layer, token, go));
};

/** The routing of every shown token at this layer, for a CSV file. */
const layerRows = (data) => {
  const { routing } = data.runs[explorerView.run];
  const sample = data.samples[routing.sample];
  const layer = routing.layers[explorerView.layer];
  const attacked = isAttacked(routing) ? routing.attacked.layers[explorerView.layer] : null;
  const chosen = [...Array(layer.ids[0].length).keys()];
  const text = sample.kind === "text";
  const place = (n) => {
    if (text) return [n + 1, sample.tokens[n]];
    const { image, row, column } = patchPlace(n, layer.grid);
    return [image + 1, row + 1, column + 1];
  };
  return [
    [...(text ? ["position", "token"] : ["image", "row", "column"]), "first_expert", "cluster",
      ...chosen.flatMap((k) => [`expert_${k + 1}`, `gate_${k + 1}`]),
      ...[...Array(layer.experts).keys()].map((expert) => `affinity_${expert}`),
      ...(attacked ? ["first_expert_attacked", "gate_attacked"] : [])],
    ...layer.first.map((first, n) => [...place(n), first, layer.cluster[n] < 0 ? null : layer.cluster[n],
      ...chosen.flatMap((k) => (layer.ids[n][k] < layer.experts ? [layer.ids[n][k], layer.gate[n][k]] : [null, null])),
      ...layer.affinity[n], ...(attacked ? [attacked.first[n], attacked.gate[n]] : [])]),
  ];
};

// The routing explorer: a run, a layer, its tokens coloured by expert, one of them in detail.

const explorerView = { run: null, layer: 1, token: 4, by: "expert", numbers: false, only: null, grid: null };

const runName = ({ name, router }) => (name.includes(router) ? name : `${name} (${router})`);

const renderExplorer = (data) => {
  const able = data.runs.map((_, index) => index).filter((index) => data.runs[index].routing !== null);
  if (!able.length) {
    $("explorer-body").replaceChildren(
      el("p", {}, "No run has a checkpoint that can be read here; the notes above say why."));
    return;
  }
  if (!able.includes(explorerView.run)) {
    explorerView.run = able.find((index) => data.runs[index].router === "adaptive") ?? able[0];
  }
  const tokens = el("div", { id: "explorer-tokens" });
  const legend = el("div", { class: "legend", id: "explorer-legend", role: "group", "aria-label": "Experts" });
  const details = el("aside", { id: "explorer-details", class: "details", "aria-live": "polite",
    "aria-label": "The chosen token" });
  const slider = el("input", { type: "range", min: 1, step: 1 });
  const sliderText = el("output", { for: "explorer-layer", id: "explorer-layer-name" });
  const about = el("p", { class: "quiet", id: "explorer-about" });
  const parts = { data, tokens, legend, details, slider, sliderText, about };
  slider.addEventListener("input", () => showLayer(parts, Number(slider.value) - 1));
  const set = (name, value) => { explorerView[name] = value; showLayer(parts, explorerView.layer); };
  $("explorer-body").replaceChildren(
    el("div", { class: "controls" },
      select("Run", "explorer-run", able.map((index) => [String(index), runName(data.runs[index])]),
        String(explorerView.run), (value) => { explorerView.grid = null; set("run", Number(value)); }),
      el("div", { class: "field wide" }, el("label", { for: "explorer-layer" }, "MoE layer"), slider, sliderText),
      select("Colour by", "explorer-by", [["expert", "first expert"], ["cluster", "cluster it was read in"]],
        explorerView.by, (value) => set("by", value)),
      checkbox("Show numbers", "explorer-numbers", explorerView.numbers, (value) => set("numbers", value))),
    about, legend, el("div", { class: "explore" }, tokens, details));
  slider.id = "explorer-layer";
  explorerView.grid = null;
  showLayer(parts, explorerView.layer);
};

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
  about.textContent = aboutSample(data, depth);
  explorerView.layer = depth;
  if (before === null || before.sample !== sample || String(before.grid) !== String(layer.grid)) {
    if (before?.grid && layer.grid && explorerView.token !== null) {
      explorerView.token = movedPatch(explorerView.token, before.grid, layer.grid);
    }
    explorerView.grid = new TokenGrid({ sample, grid: layer.grid, choose: (token) => {
      explorerView.token = token;
      showDetails(parts);
    } });
    tokens.replaceChildren(explorerView.grid.node);
  }
  explorerView.grid.node.classList.toggle("numbered", explorerView.numbers);
  paintTokens(parts);
  showDetails(parts);
};

/** Also names the run and the layer: on paper the controls are gone. */
const aboutSample = (data, depth) => {
  const run = data.runs[explorerView.run];
  const { routing } = run;
  const sample = data.samples[routing.sample];
  const count = routing.layers[depth].first.length;
  const what = sample.kind === "text" ? sample.unit : `patches of ${sample.images.length} images`;
  return `${run.name}, MoE layer ${depth + 1}: ${count} ${what} of ${sample.title}; `
    + `${routing.step === null ? "" : `checkpoint of step ${whole(routing.step)}, `}statistics ${routing.statistics}. `
    + "Choose one to see its affinities; arrow keys move, Enter chooses.";
};

const paintTokens = (parts) => {
  const layer = parts.data.runs[explorerView.run].routing.layers[explorerView.layer];
  const values = explorerView.by === "expert" ? layer.first : layer.cluster;
  if (explorerView.only !== null && explorerView.only >= layer.experts) explorerView.only = null;
  explorerView.grid.colour(values, explorerView.only);
  explorerView.grid.mark(explorerView.token);
  const toggle = (expert) => () => {
    explorerView.only = explorerView.only === expert ? null : expert;
    paintTokens(parts);
    $(`expert-${expert}`).focus();
  };
  const known = values.filter((value) => value >= 0).length;
  parts.legend.replaceChildren(...[...Array(layer.experts).keys()].map((expert) => {
    const share = values.filter((value) => value === expert).length / Math.max(1, known);
    const button = el("button", { type: "button", id: `expert-${expert}`, class: "chip", "aria-pressed":
      String(explorerView.only === expert), title: `show ${explorerView.by} ${expert} alone`, onclick: toggle(expert) },
    `${expert}`, el("span", { class: "share" }, `${(100 * share).toFixed(0)}%`));
    paint(button, expert);
    return button;
  }));
};

const showDetails = (parts) => {
  const { data, details } = parts;
  const { run, layer, token } = explorerView;
  const shown = data.runs[run].routing.layers[layer];
  if (token === null || token >= shown.first.length) {
    details.replaceChildren(el("p", { class: "quiet" }, "Choose a token: its affinities, its cluster, the features "
      + "stretched most for it, and where it went in the other runs."));
    return;
  }
  const go = (depth) => {
    showLayer(parts, depth);
    details.querySelectorAll(".path button")[depth]?.focus();
  };
  details.replaceChildren(...tokenDetails(data, run, layer, token, go));
};

// Load of every expert and instability of every layer, run by run, as tables that also print.

const renderLayers = (data) => {
  const able = data.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.routing !== null);
  if (!able.length) {
    $("layers-body").replaceChildren(el("p", {}, "Not measured: no run has a checkpoint that can be read here."));
    return;
  }
  $("layers-body").replaceChildren(
    el("p", { class: "quiet" }, "Load: the percentage of tokens that each expert (column) receives at each MoE "
      + "layer (row); blue is above an even share, orange below. Instability: the percentage of pairs of tokens that "
      + "share a first expert at one of two consecutive MoE layers but not at the other; the vertical mark is its value "
      + "for experts chosen at random with the same loads."),
    el("div", { class: "pair" }, able.map(({ run, index }) => el("div", {},
      el("h3", {}, runMark(index), ` ${run.name}`), loadTable(run), instabilityList(run),
      el("p", { class: "quiet" }, `Measured over ${run.routing.measured}`
        + `${run.routing.statistics === "none" ? "" : `, with ${run.routing.statistics} statistics`}.`)))));
};

const loadRows = (run) => [["layer", "expert", "load_percent"], ...run.routing.measures.flatMap((one, depth) =>
  one.load.map((share, expert) => [depth + 1, expert, share]))];

const instabilityRows = (run) => [["layer", "instability", "chance"], ...run.routing.measures.flatMap((one, depth) =>
  (one.instability === null ? [] : [[depth + 1, one.instability, one.chance]]))];

const loadTable = (run) => {
  const { measures } = run.routing;
  const experts = Math.max(...measures.map((one) => one.load.length));
  const head = el("tr", {}, el("th", { scope: "col" }, "Layer"),
    [...Array(experts).keys()].map((expert) => el("th", { scope: "col" }, String(expert))),
    el("th", { scope: "col", title: "standard deviation over experts, points" }, "std"));
  const rows = measures.map((one, depth) => el("tr", {}, el("th", { scope: "row" }, String(depth + 1)),
    one.load.map((share) => heat(share, 100 / one.load.length)),
    el("td", { class: "total" }, fixed(one.load_balance, 1))));
  const table = el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, rows));
  return el("div", {}, framed(`Load of ${run.name}`, table),
    saveButtons(`load of ${run.name}`, { node: () => table, rows: () => loadRows(run) }));
};

/** One cell of the table; the colour is strongest at twice the even share and at zero. */
const heat = (share, even) => {
  const away = Math.max(-1, Math.min(1, share / even - 1));
  const node = el("td", { class: away >= 0 ? "over" : "under", title: `${fixed(share, 2)}%, even ${fixed(even, 2)}%` },
    fixed(share, share < 9.95 ? 1 : 0));
  node.style.setProperty("--strength", `${Math.round(Math.abs(away) * 100)}%`);
  return node;
};

const instabilityList = (run) => {
  const rows = run.routing.measures.map((one, depth) => {
    if (one.instability === null) return null;
    const most = Math.max(0.5, ...run.routing.measures.map((other) => other.chance ?? 0));
    const fill = el("span", { class: "fill" });
    fill.style.width = `${(100 * one.instability) / most}%`;
    const mark = el("span", { class: "tick", title: `chance ${fixed(100 * one.chance, 1)}%` });
    mark.style.left = `${(100 * one.chance) / most}%`;
    return el("li", {}, el("span", { class: "key" }, `layer ${depth + 1}`),
      el("span", { class: "track" }, fill, mark),
      el("span", { class: "value" }, `${fixed(100 * one.instability, 1)}%`,
        el("span", { class: "quiet" }, ` chance ${fixed(100 * one.chance, 1)}%`)));
  }).filter((row) => row !== null);
  const chart = el("ol", { class: "bars long" }, rows);
  return rows.length ? el("div", {}, el("h4", {}, "Instability"), chart,
    saveButtons(`instability of ${run.name}`, { node: () => chart, rows: () => instabilityRows(run) })) : "";
};

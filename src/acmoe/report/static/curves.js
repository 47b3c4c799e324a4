// The convergence section: which figure, which runs, which axes.

const curvesView = {
  metric: null, x: "step", logX: false, logY: false, smooth: 0,
  train: true, valid: true, hidden: new Set(), chart: null,
};

const NOT_CURVES = new Set(["kind", "step", "seconds", "tokens", "batch", "block", "images"]);

/** Figures that some run has a curve of, the one it is judged by first. */
const curveKeys = (data) => {
  const keys = new Set(data.runs.map((run) => run.metric.key));
  for (const run of data.runs) {
    for (const columns of [run.valid, run.train]) Object.keys(columns).forEach((key) => keys.add(key));
  }
  return [...keys].filter((key) => !NOT_CURVES.has(key));
};

const curveName = (key) => ({
  loss: "loss (nats)", aux_loss: "auxiliary loss", lr: "learning rate", top1: "top-1 (%)", top5: "top-5 (%)",
  load_balance: "load balance (std over experts)",
}[key] ?? words(key));

/** Train and validation curves of every run, smoothed as asked. */
const curveSeries = (data) => {
  const { metric, x, smooth } = curvesView;
  const found = [];
  data.runs.forEach((run, index) => {
    for (const split of ["valid", "train"]) {
      const columns = run[split];
      if (!(metric in columns) || !(x in columns)) continue;
      const kept = columns[metric].map((value, place) => [columns[x][place], value])
        .filter(([at, value]) => at !== null && value !== null);
      if (!kept.length) continue;
      const raw = kept.map(([, value]) => value);
      found.push({
        key: `${index}-${split}`, split, name: `${run.name}, ${split === "valid" ? "validation" : "training"}`,
        run: index, thin: split === "train", marks: split === "valid",
        x: kept.map(([at]) => at), y: smooth ? smoothed(raw, smooth) : raw, raw: smooth ? raw : null,
      });
    }
  });
  return found;
};

const renderCurves = (data) => {
  const keys = curveKeys(data);
  if (!keys.includes(curvesView.metric)) curvesView.metric = keys[0] ?? null;
  if (!keys.length || !data.runs.some((run) => run.train.step || run.valid.step)) {
    $("curves-body").replaceChildren(el("p", {}, data.runs.every((run) => run.state === "analyzed")
      ? "No curves: nothing here was trained by acmoe." : "No run has written a figure yet."));
    curvesView.chart = null;
    return;
  }
  const legend = el("div", { class: "legend", id: "curves-legend" });
  const chart = new Chart({
    label: "Convergence",
    readout: (x, values) => legend.querySelectorAll("output").forEach((output, place) => {
      output.textContent = values[place] === null || values[place] === undefined ? "" : short(values[place]);
    }),
  });
  chart.zoom = curvesView.chart?.zoom ?? null;
  curvesView.chart = chart;
  const redraw = () => drawCurves(data, legend);
  const set = (name, numeric) => (value) => {
    curvesView[name] = numeric ? Number(value) : value;
    if (name === "x") chart.zoom = null;
    redraw();
    if (name === "x" || name === "metric") keepLink(data);
  };
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02 });
  smoothing.value = curvesView.smooth;
  smoothing.addEventListener("input", () => set("smooth", true)(smoothing.value));
  const drawn = el("div", {}, legend, chart.node);
  $("curves-body").replaceChildren(
    el("div", { class: "controls" },
      select("Figure", "curves-metric", keys.map((key) => [key, curveName(key)]), curvesView.metric, set("metric")),
      select("Against", "curves-x", [["step", "steps"], ["seconds", "seconds of training"]], curvesView.x, set("x")),
      labelled("Smoothing", smoothing, "curves-smooth"),
      checkbox("Training", "curves-train", curvesView.train, set("train")),
      checkbox("Validation", "curves-valid", curvesView.valid, set("valid")),
      checkbox("Log x", "curves-log-x", curvesView.logX, set("logX")),
      checkbox("Log y", "curves-log-y", curvesView.logY, set("logY")),
      el("button", { type: "button", id: "curves-reset", onclick: () => chart.reset() }, "Show everything")),
    drawn, saveButtons("convergence", { node: () => drawn, rows: () => curveRows(data),
      title: () => `Convergence: ${curveName(curvesView.metric)}` }),
    el("p", { class: "quiet hint" }, "Drag across the chart to zoom, double-click to go back; in use, the wheel "
      + "and the keys +, \u2212, 0 and arrows work too. Thin lines: training."));
  redraw();
};

/** Every point of the drawn curves, for a CSV file. */
const curveRows = (data) => {
  const { metric, x, smooth } = curvesView;
  const drawn = curveSeries(data).filter((one) => curvesView[one.split] && !curvesView.hidden.has(one.key));
  return [["run", "split", x, metric, ...(smooth ? [`${metric}_smoothed`] : [])],
    ...drawn.flatMap((one) => one.x.map((at, place) => [data.runs[one.run].name, one.split, at,
      (one.raw ?? one.y)[place], ...(smooth ? [one.y[place]] : [])]))];
};

const drawCurves = (data, legend) => {
  const every = curveSeries(data).filter((one) => curvesView[one.split]);
  const shown = every.filter((one) => !curvesView.hidden.has(one.key));
  const toggle = (one) => () => {
    const { hidden } = curvesView;
    if (!hidden.delete(one.key)) hidden.add(one.key);
    drawCurves(data, legend);
    $(`legend-${one.key}`).focus();
  };
  legend.replaceChildren(...every.map((one) => {
    const on = !curvesView.hidden.has(one.key);
    return el("button", {
      type: "button", id: `legend-${one.key}`, "aria-pressed": String(on), class: one.thin ? "thin" : null,
      onclick: toggle(one),
    }, runMark(one.run, one.thin), ` ${one.name} `, on ? el("output", {}) : null);
  }));
  curvesView.chart.show(shown, {
    xLabel: curvesView.x === "step" ? "step" : "seconds",
    yLabel: curveName(curvesView.metric), logX: curvesView.logX, logY: curvesView.logY,
  });
};

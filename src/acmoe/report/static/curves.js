// The convergence section: which figure, which runs, which axes.

const curvesView = {
  metric: null, x: "step", logX: false, logY: false, smooth: 0,
  train: true, valid: true, seeds: "both", hidden: new Set(), chart: null,
};

const SEEDS = [["both", "mean and single runs"], ["mean", "mean \u00b1 standard deviation"], ["runs", "single runs"]];

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

/** Steps, places on the x axis and values of one curve, without records that lack one of them; null: no curve. */
const curveOf = (run, split) => {
  const { metric, x } = curvesView;
  const columns = run[split];
  if (!(metric in columns) || !(x in columns)) return null;
  const kept = columns[metric].map((_, place) => place)
    .filter((place) => columns[metric][place] !== null && columns[x][place] !== null);
  const pick = (key) => kept.map((place) => columns[key][place]);
  return kept.length ? { step: pick("step"), x: pick(x), y: pick(metric) } : null;
};

/** A series of the chart from a curve, smoothed as asked. */
const seriesOf = ({ x, y, std = null }, more) => {
  const { smooth } = curvesView;
  return { x, y: smooth ? smoothed(y, smooth) : y, raw: smooth ? y : null, std, ...more };
};

const splitName = (split) => (split === "valid" ? "validation" : "training");

/** Train and validation curves of every run. */
const runSeries = (data) => data.runs.flatMap((run, index) => ["valid", "train"].flatMap((split) => {
  const curve = curveOf(run, split);
  return curve === null ? [] : [seriesOf(curve, {
    key: `${index}-${split}`, split, name: `${run.name}, ${splitName(split)}`, label: run.name, run: index,
    style: runStyles[index], kind: split === "train" ? "thin" : null, marks: split === "valid",
  })];
}));

/** The runs that a mean counts, as in the table of configurations: finished ones, the first of each seed. */
const countedRuns = (data, group) => {
  const finished = group.runs.filter((index) => data.runs[index].state === "finished");
  const seeds = finished.map((index) => data.runs[index].seed);
  return finished.filter((_, place) => seeds[place] !== null && seeds.indexOf(seeds[place]) === place);
};

/** Mean and standard deviation of several curves, at the steps that all of them have. */
const meanCurve = (curves) => {
  const places = curves.map((curve) => new Map(curve.step.map((step, place) => [step, place])));
  const steps = curves[0].step.filter((step) => places.every((known) => known.has(step)));
  const at = (key, step) => curves.map((curve, n) => curve[key][places[n].get(step)]);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const deviation = (values) => {
    const middle = mean(values);
    return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
  };
  return {
    step: steps, x: steps.map((step) => mean(at("x", step))), y: steps.map((step) => mean(at("y", step))),
    std: steps.map((step) => deviation(at("y", step))),
  };
};

/** Mean curves of the configurations that have two finished runs or more. */
const meanSeries = (data) => data.groups.flatMap((group, place) => ["valid", "train"].flatMap((split) => {
  const runs = countedRuns(data, group).filter((index) => curveOf(data.runs[index], split) !== null);
  if (runs.length < 2) return [];
  const curve = meanCurve(runs.map((index) => curveOf(data.runs[index], split)));
  const label = `${group.name} (mean of ${runs.length} seeds)`;
  return curve.x.length ? [seriesOf(curve, {
    key: `mean-${place}-${split}`, split, name: `${group.name}, ${splitName(split)}, mean of ${runs.length} seeds`,
    label, runs, style: { color: place % 6, dash: DASHES[Math.floor(place / 6) % 6] },
    kind: split === "train" ? "mean thin" : "mean", marks: false, band: curvesView.seeds === "mean",
  })] : [];
}));

/** The curves to draw, those that lie behind others first: runs behind their mean. */
const curveSeries = (data) => {
  const runs = runSeries(data);
  const means = curvesView.seeds === "runs" ? [] : meanSeries(data);
  const meanOf = (one) => means.find((mean) => mean.split === one.split && mean.runs.includes(one.run));
  const behind = curvesView.seeds === "both" ? runs.filter(meanOf).map((one) => ({
    ...one, key: meanOf(one).key, kind: "behind", marks: false, behind: true })) : [];
  return [...behind, ...means, ...runs.filter((one) => !meanOf(one))];
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
    readout: (texts) => legend.querySelectorAll("output").forEach((output, place) => {
      output.textContent = texts[place] ?? "";
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
      severalSeeds(data) ? select("Seeds", "curves-seeds", SEEDS, curvesView.seeds, set("seeds")) : null,
      labelled("Smoothing", smoothing, "curves-smooth"),
      checkbox("Training", "curves-train", curvesView.train, set("train")),
      checkbox("Validation", "curves-valid", curvesView.valid, set("valid")),
      checkbox("Log x", "curves-log-x", curvesView.logX, set("logX")),
      checkbox("Log y", "curves-log-y", curvesView.logY, set("logY")),
      el("button", { type: "button", id: "curves-reset", onclick: () => chart.reset() }, "Show everything")),
    drawn, saveButtons("convergence", { node: () => drawn, rows: () => curveRows(data),
      title: () => `Convergence: ${curveName(curvesView.metric)}` }),
    el("p", { class: "quiet hint" }, "Drag across the chart to zoom, double-click to go back. After a click on the "
      + "chart, the wheel and the keys +, \u2212, 0 and arrows work too. Thin lines: training."
      + (severalSeeds(data) ? " Faint lines: the single runs behind a mean, which counts finished runs, at the steps "
        + "that all of them have; a seed counts once." : "")));
  redraw();
};

/** Every point of the drawn curves, for a CSV file; a mean has its standard deviation beside it. */
const curveRows = (data) => {
  const { metric, x, smooth } = curvesView;
  const drawn = curveSeries(data).filter((one) => curvesView[one.split] && !curvesView.hidden.has(one.key));
  const means = drawn.some((one) => one.std);
  return [["run", "split", x, metric, ...(means ? [`${metric}_std`] : []), ...(smooth ? [`${metric}_smoothed`] : [])],
    ...drawn.flatMap((one) => one.x.map((at, place) => [one.label, one.split, at, (one.raw ?? one.y)[place],
      ...(means ? [one.std?.[place]] : []), ...(smooth ? [one.y[place]] : [])]))];
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
  legend.replaceChildren(...every.filter((one) => !one.behind).map((one) => {
    const on = !curvesView.hidden.has(one.key);
    return el("button", {
      type: "button", id: `legend-${one.key}`, "aria-pressed": String(on), class: one.split === "train" ? "thin" : null,
      onclick: toggle(one),
    }, lineMark(one.style, one.split === "train"), ` ${one.name} `, on ? el("output", {}) : null);
  }));
  curvesView.chart.show(shown, {
    xLabel: curvesView.x === "step" ? "step" : "seconds",
    yLabel: curveName(curvesView.metric), logX: curvesView.logX, logY: curvesView.logY,
  });
};

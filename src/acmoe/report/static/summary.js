// The table of runs, routers over seeds, and the plain reading.

const STATES = {
  finished: "finished",
  training: "training now",
  stopped: "stopped early",
  "not started": "not started",
  analyzed: "not trained here",
};

const renderSummary = (data) => {
  const metrics = new Set(data.runs.map((run) => run.metric.label));
  const one = metrics.size === 1 ? [...metrics][0] : "best validation";
  const heads = ["Run", "Router", "Seed", "Steps", `Best ${one}`, "Minus the first run", "Median speed", "Time"];
  const rows = data.runs.map((run, index) => el("tr", {},
    el("th", { scope: "row" }, runMark(index), ` ${run.name}`,
      el("span", { class: `state ${run.state.replace(" ", "-")}` }, STATES[run.state])),
    cell("Router", run.router),
    cell("Seed", run.seed === null ? "\u2013" : String(run.seed)),
    cell("Steps", run.state === "analyzed" ? "\u2013"
      : `${whole(run.step)} / ${run.steps === null ? "?" : whole(run.steps)}`),
    cell(`Best ${one}`, bestOf(run, metrics.size > 1)),
    cell("Minus the first run", differenceOf(run, index)),
    cell("Median speed", run.speed === null ? "\u2013"
      : `${whole(run.speed.value)} ${words(run.speed.unit).replace(" per second", "/s")}`),
    cell("Time", duration(run.seconds))));
  const table = el("table", { class: "stack numbers" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows));
  const notes = data.runs.flatMap((run) => run.notes.map((note) => `${run.name}: ${note}`));
  $("summary-body").replaceChildren(
    framed("Runs", table),
    pairsTable(data.pairs),
    notes.length ? el("ul", { class: "notes" }, notes.map((note) => el("li", {}, note))) : "");
};

const bestOf = (run, named) => {
  if (run.best === null) return "\u2013";
  const at = el("span", { class: "quiet" }, ` at step ${whole(run.best.step)}`);
  return el("span", {}, fixed(run.best.value, decimalsOf(run)),
    named ? el("span", { class: "quiet" }, ` ${run.metric.label}`) : null, at);
};

const decimalsOf = (run) => (run.best !== null && Math.abs(run.best.value) >= 20 ? 2 : 4);

const differenceOf = (run, index) => {
  if (index === 0) return el("span", { class: "quiet" }, "the reference");
  if (run.difference === null) return "\u2013";
  const { value, percent, step } = run.difference;
  const more = [];
  if (percent !== null) more.push(`${signed(percent, 2)}%`);
  if (step !== null) more.push(`both at step ${whole(step)}`);
  return el("span", {}, signed(value, decimalsOf(run)),
    el("span", { class: "quiet" }, more.length ? ` (${more.join(", ")})` : ""));
};

const pairsTable = (pairs) => {
  if (!pairs.some((pair) => pair.seeds.length > 1)) return ""; // one seed: the table above says it all
  const heads = ["Comparison", "Seeds", "First", "Second", "Mean difference", "95% interval"];
  const spread = (mean, by) => `${short(mean)}${by === null ? "" : ` \u00b1 ${short(by, 2)}`}`;
  const rows = pairs.map((pair) => el("tr", {},
    el("th", { scope: "row" }, `${pair.second} minus ${pair.first}`,
      el("span", { class: "quiet" }, ` ${pair.metric}`)),
    cell("Seeds", pair.seeds.join(", ")),
    cell("First", spread(pair.first_mean, pair.first_spread)),
    cell("Second", spread(pair.second_mean, pair.second_spread)),
    cell("Mean difference", signed(pair.difference, 4)),
    cell("95% interval", pair.low === null
      ? el("span", { class: "quiet" }, "none: one seed")
      : `${signed(pair.low, 4)} to ${signed(pair.high, 4)}`)));
  return el("div", {},
    el("h3", {}, "Routers over paired seeds"),
    framed("Routers over paired seeds", el("table", { class: "stack numbers" },
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows))));
};

const renderReading = (data) => {
  const part = (title, lines) => el("div", {}, el("h3", {}, title),
    el("ul", {}, lines.map((line) => el("li", {}, line))));
  $("reading-body").replaceChildren(
    part("They show", data.reading.shows),
    data.reading.cannot.length ? part("They cannot show", data.reading.cannot) : "");
};

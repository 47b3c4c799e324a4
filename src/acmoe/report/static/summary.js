// The table of runs, their test scores, and the findings in sentences.

const STATES = {
  finished: "finished",
  training: "training now",
  stopped: "stopped before its last step",
  "not started": "not started",
  analyzed: "not trained by acmoe",
};

const renderSummary = (data) => {
  const metrics = new Set(data.runs.map((run) => run.metric.label));
  const one = metrics.size === 1 ? [...metrics][0] : "validation score";
  const heads = [
    "Run", "Router", "Seed", "Steps", `Best ${one}`, "Difference from the first run", "Test score",
    "Median speed", "Training time",
  ];
  const rows = data.runs.map((run, index) => el("tr", {},
    el("th", { scope: "row" }, runMark(index), ` ${run.name}`,
      el("span", { class: `state ${run.state.replace(" ", "-")}` }, STATES[run.state])),
    cell("Router", run.router),
    cell("Seed", run.seed === null ? "\u2013" : String(run.seed)),
    cell("Steps", run.state === "analyzed" ? "\u2013"
      : `${whole(run.step)}\u00a0of\u00a0${run.steps === null ? "?" : whole(run.steps)}`),
    cell(`Best ${one}`, bestOf(run, metrics.size > 1)),
    cell("Difference from the first run", differenceOf(run, index)),
    cell("Test score", testOf(run)),
    cell("Median speed", run.speed === null ? "\u2013"
      : `${whole(run.speed.value)} ${words(run.speed.unit).replace(" per second", "/s")}`),
    cell("Training time", duration(run.seconds))));
  const notes = data.runs.flatMap((run) => run.notes.map((note) => `${run.name}: ${note}`));
  $("summary-body").replaceChildren(
    framed("Runs", plainTable("stack numbers", heads, rows)),
    missingTests(data.runs),
    allTests(data.runs),
    groupsTable(data),
    pairsTable(data.pairs),
    notes.length ? el("ul", { class: "notes" }, notes.map((note) => el("li", {}, note))) : "");
};

const plainTable = (kind, heads, rows) => el("table", { class: kind },
  el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
  el("tbody", {}, rows));

const scoreText = (value) => fixed(value, Math.abs(value) >= 20 ? 2 : 4);

const testOf = (run) => {
  if (run.test === null) return el("span", { class: "quiet" }, run.state === "analyzed" ? "\u2013" : "not measured");
  const name = run.test.label.replace(/^test /, "");
  return el("span", {}, scoreText(run.test.value), el("span", { class: "quiet" }, ` ${name}, at step ${whole(run.test.step)}`));
};

/** The commands that would measure test scores which are not there. */
const missingTests = (runs) => {
  const missing = runs.filter((run) => run.test === null && run.test_command);
  if (!missing.length) return "";
  return el("div", { class: "missing", id: "missing-tests" },
    el("p", {}, `No test score of ${missing.map((run) => run.name).join(", ")}. To measure it, run:`),
    el("pre", { tabindex: 0 }, missing.map((run) => run.test_command).join("\n")));
};

/** How each test score was measured; folded away, since the table above has one of each run. */
const allTests = (runs) => {
  const heads = ["Run", "Test score", "Checkpoint", "Statistics mode", "Measured on", "File"];
  const rows = runs.flatMap((run, index) => run.tests.map((score) => el("tr", {},
    el("th", { scope: "row" }, runMark(index), ` ${run.name}`),
    cell("Test score", scoreText(score.value), el("span", { class: "quiet" }, ` ${score.label}`)),
    cell("Checkpoint", `step ${whole(score.step)}`),
    cell("Statistics mode", score.statistics),
    cell("Measured on", score.protocol),
    cell("File", score.source))));
  if (!rows.length) return "";
  return el("details", { id: "tests" },
    el("summary", {}, `How the test scores were measured (${rows.length})`),
    framed("Test scores", plainTable("stack", heads, rows)));
};

const bestOf = (run, named) => {
  if (run.best === null) return "\u2013";
  const at = el("span", { class: "quiet" }, ` at step ${whole(run.best.step)}`);
  return el("span", {}, fixed(run.best.value, decimalsOf(run)),
    named ? el("span", { class: "quiet" }, ` ${run.metric.label}`) : null, at);
};

const decimalsOf = (run) => (run.best !== null && Math.abs(run.best.value) >= 20 ? 2 : 4);

const differenceOf = (run, index) => {
  if (index === 0) return el("span", { class: "quiet" }, "the first run");
  if (run.difference === null) return "\u2013";
  const { value, percent, step } = run.difference;
  const more = [];
  if (percent !== null) more.push(`${signed(percent, 2)}%`);
  if (step !== null) more.push(`both at step ${whole(step)}`);
  return el("span", {}, signed(value, decimalsOf(run)),
    el("span", { class: "quiet" }, more.length ? ` (${more.join(", ")})` : ""));
};

const renderReading = (data) => {
  const part = (title, lines) => el("div", {}, el("h3", {}, title),
    el("ul", {}, lines.map((line) => el("li", {}, line))));
  $("reading-body").replaceChildren(
    part("The figures show", data.reading.shows),
    data.reading.cannot.length ? part("The figures cannot show", data.reading.cannot) : "");
};

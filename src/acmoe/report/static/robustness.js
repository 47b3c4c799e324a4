// Scores on attacked, contaminated or shifted inputs, beside those on clean inputs.

const renderRobustness = (data) => {
  const rows = data.runs.flatMap((run, index) => run.robustness.figures.map((figure) => ({ run, index, figure })));
  const missing = data.runs.filter((run) => !run.robustness.figures.length && run.robustness.command);
  rows.sort((a, b) => a.figure.what.localeCompare(b.figure.what, "en", { numeric: true }) || a.index - b.index);
  $("robustness-body").replaceChildren(
    rows.length ? robustnessTable(rows) : "",
    missing.length ? el("div", { class: "missing" },
      el("p", {}, `No score on changed input for ${missing.map((run) => run.name).join(", ")}. To measure one, run:`),
      el("pre", { tabindex: 0 }, missing.map((run) => run.robustness.command).join("\n"))) : "");
};

const robustnessTable = (rows) => {
  const heads = ["Change of the input", "Run", "Score", "Clean input", "Changed input", "Difference"];
  let last = null;
  const body = rows.map(({ run, index, figure }) => {
    const again = figure.what === last;
    last = figure.what;
    const change = figure.clean === null ? null : figure.value - figure.clean;
    return el("tr", { title: `${figure.details} (${figure.source})`, class: again ? null : "begins" },
      el("th", { scope: "row", class: again ? "again" : null }, figure.what),
      cell("Run", runMark(index), ` ${run.name}`),
      cell("Score", figure.unit),
      cell("Clean input", figureText(figure.clean, figure)),
      cell("Changed input", figureText(figure.value, figure),
        figure.chance === null ? null : el("span", { class: "quiet" }, ` (${short(figure.chance, 3)} by chance)`)),
      cell("Difference", change === null ? "\u2013" : signed(change, figure.lower ? 4 : 2)));
  });
  const details = [...new Set(rows.map(({ figure }) => figure.details))];
  return el("div", {}, framed("Robustness", el("table", { class: "stack numbers" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, body))),
  el("p", { class: "quiet" }, details.length > 1 ? "These scores were measured on:" : "All scores were measured on:"),
  el("ul", { class: "quiet plain" }, details.map((text) => el("li", {}, text))));
};

const figureText = (value, figure) => fixed(value, figure.lower ? 4 : 2);

// The command, commit, versions and device of every start of every run.

const NOT_RECORDED = "not recorded";

const renderProvenance = (data) => {
  const heads = ["Run", "Started", "Commit", "Versions", "Device", "Command"];
  const rows = data.runs.flatMap((run, index) => (run.starts.length
    ? startRows(run, index)
    : [el("tr", { class: "begins" }, runHead(run, index, false),
      heads.slice(1).map((head) => cell(head, el("span", { class: "quiet" }, NOT_RECORDED))))]));
  $("provenance-body").replaceChildren(
    el("p", { class: "quiet" }, "One row for each start of a run: a run that was stopped and continued has several."),
    framed("Code, command and device of each run", plainTable("stack", heads, rows)));
};

const runHead = (run, index, again) =>
  el("th", { scope: "row", class: again ? "again" : null }, again ? null : runMark(index), ` ${run.name}`);

const startRows = (run, index) => {
  const late = run.starts[0].step > 0; // an earlier version, which recorded nothing, began the run
  const before = late ? [el("tr", { class: "begins" }, runHead(run, index, false),
    cell("Started", `before step ${whole(run.starts[0].step)}`),
    ["Commit", "Versions", "Device", "Command"].map((head) => cell(head, el("span", { class: "quiet" }, NOT_RECORDED))))] : [];
  return [...before, ...run.starts.map((start, place) => startRow(run, index, start, late || place > 0))];
};

const startRow = (run, index, start, again) => el("tr", { class: again ? null : "begins" },
  runHead(run, index, again),
  cell("Started", `${start.time.slice(0, 16).replace("T", " ")} UTC`,
    el("span", { class: "quiet" }, start.step ? `, after step ${whole(start.step)}` : "")),
  cell("Commit", start.commit ?? el("span", { class: "quiet" }, NOT_RECORDED)),
  cell("Versions", `acmoe ${start.acmoe}, torch ${start.torch}, Python ${start.python}`),
  cell("Device", `${start.device} (${start.device_name})`,
    start.processes > 1 ? `, ${start.processes} processes` : ""),
  cell("Command", el("code", {}, start.command)));

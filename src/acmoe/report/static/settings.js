// The settings in which the runs differ; the rest can be shown.

const settingsView = { all: false };

const renderSettings = (data) => {
  const single = data.runs.length === 1;
  const everything = settingsView.all || single;
  const apart = data.settings.filter((row) => row.differs);
  const folded = data.settings.filter((row) => row.only !== null && !row.differs);
  const redraw = (all) => {
    settingsView.all = all;
    renderSettings(data);
    $("settings-all").focus();
  };
  $("settings-body").replaceChildren(
    single ? "" : el("div", { class: "controls" },
      el("p", {}, settingsSentence(data.settings.length, apart.length, folded.length)),
      checkbox("Show all settings", "settings-all", settingsView.all, redraw)),
    everything || apart.length ? framed("Settings", settingsTable(data, everything ? data.settings : apart)) : "",
    everything ? "" : el("div", {}, foldedSettings(data, folded)));
};

const settingsSentence = (count, apart, folded) => {
  const rest = count - apart - folded;
  const parts = [apart ? `The runs differ in ${apart} of ${count} settings, marked \u2260.`
    : `The runs have the same values in ${folded ? "all settings that they share" : `all ${count} settings`}.`];
  if (folded) parts.push(`${folded} settings exist only for some routers or models.`);
  if (apart && rest) parts.push(`${rest} are the same.`);
  return parts.join(" ");
};

const settingsTable = (data, shown) => el("table", { class: "settings" },
  el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"),
    data.runs.map((run) => el("th", { scope: "col" }, run.name)))),
  el("tbody", {}, shown.map((row) => el("tr", { class: row.differs ? "differs" : null },
    el("th", { scope: "row" },
      row.differs ? el("span", { class: "flag", title: "differs between the runs" }, "\u2260 ") : null,
      row.key),
    row.values.map((value, index) => cell(data.runs[index].name,
      value === null ? el("span", { class: "quiet" }, "\u2013") : value))))));

/** Settings that only some runs have, by the runs that have them; each has one value. */
const foldedSettings = (data, rows) => {
  const sets = new Map();
  for (const row of rows) {
    const key = row.only.join();
    sets.set(key, [...(sets.get(key) ?? []), row]);
  }
  return [...sets.values()].map((own) => el("details", { class: "folded" },
    el("summary", {}, `${own.length} setting${own.length === 1 ? "" : "s"} of ${havingText(data, own[0].only)} only`),
    el("ul", { class: "plain" }, own.map((row) => el("li", {},
      el("code", {}, `${row.key} = ${row.values[row.only[0]]}`))))));
};

/** "the router adaptive" where exactly the runs with that router are meant, or the names of runs. */
const havingText = (data, having) => {
  const routers = new Set(having.map((index) => data.runs[index].router));
  const same = data.runs.filter((run) => routers.has(run.router)).length === having.length;
  if (routers.size === 1 && same && having.length > 1) return `the router ${[...routers][0]}`;
  return having.map((index) => data.runs[index].name).join(", ");
};

// Every setting of every run, what differs marked.

const settingsView = { all: false };

const renderSettings = (data) => {
  const apart = data.settings.filter((row) => row.differs);
  const single = data.runs.length === 1;
  const shown = settingsView.all || single ? data.settings : apart;
  const body = el("tbody", {}, shown.map((row) => el("tr", { class: row.differs ? "differs" : null },
    el("th", { scope: "row" },
      row.differs ? el("span", { class: "flag", title: "differs between the runs" }, "\u2260 ") : null,
      row.key),
    row.values.map((value, index) => cell(data.runs[index].name,
      value === null ? el("span", { class: "quiet" }, "\u2013") : value)))));
  const table = el("table", { class: "settings" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"),
      data.runs.map((run) => el("th", { scope: "col" }, run.name)))),
    body);
  const redraw = (all) => {
    settingsView.all = all;
    renderSettings(data);
    $("settings-all").focus();
  };
  $("settings-body").replaceChildren(
    single ? "" : el("div", { class: "controls" },
      el("p", {}, apart.length
        ? `${apart.length} of ${data.settings.length} settings differ, marked \u2260.`
        : `All ${data.settings.length} settings are the same.`),
      checkbox("Show all settings", "settings-all", settingsView.all, redraw)),
    shown.length ? framed("Settings", table) : "");
};

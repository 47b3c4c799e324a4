// Means over the seeds of one configuration, and differences of configurations seed by seed.

const meanText = (spread) => {
  if (spread === null) return "\u2013";
  return el("span", {}, spread.std === null ? scoreText(spread.mean) : `${scoreText(spread.mean)} \u00b1 ${short(spread.std, 2)}`,
    el("span", { class: "quiet" }, ` n = ${spread.n}`));
};

/** One row for each configuration, where some configuration was trained with several seeds. */
const groupsTable = (data) => {
  if (!severalSeeds(data)) return ""; // the table of runs says it all
  const heads = ["Configuration", "Seeds", "Best validation", "Last validation", "Test"];
  const rows = data.groups.map((group) => el("tr", {},
    el("th", { scope: "row" }, group.runs.map((index) => runMark(index)), ` ${group.name}`,
      el("span", { class: "quiet" }, ` ${group.metric}`)),
    cell("Seeds", group.seeds.length ? group.seeds.join(", ") : "\u2013",
      leftOut(group)),
    cell("Best validation", meanText(group.best)),
    cell("Last validation", meanText(group.last)),
    cell("Test", meanText(group.test),
      group.test === null ? null : el("span", { class: "quiet" }, `, ${testName(group.test)}`))));
  return el("div", { id: "groups" },
    el("h3", {}, "Configurations over their seeds"),
    el("p", { class: "quiet" }, "Mean \u00b1 standard deviation over the finished runs of a configuration; "
      + "n is the number of seeds. The runs of a configuration have the same settings but for seed, device and data folder."),
    framed("Configurations over their seeds", plainTable("stack numbers", heads, rows)));
};

/** Runs that no mean counts: those that are not finished, and later runs of a seed. */
const leftOut = (group) => {
  const parts = [];
  if (group.unfinished) parts.push(`${group.unfinished} not finished`);
  if (group.repeated) parts.push(`${group.repeated} of a seed that is counted already`);
  return parts.length ? el("span", { class: "quiet" }, ` (without ${parts.join(" and ")})`) : null;
};

const testName = (test) => test.label.replace(/^test /, "") + (test.at_best ? "" : ", not of the best checkpoint");

const pairsTable = (pairs) => {
  if (!pairs.some((pair) => pair.seeds.length > 1)) return ""; // one seed: the table of runs says it all
  const heads = ["Comparison", "Seeds", "Means", "Mean difference", "95% interval"];
  const spread = (mean, by) => `${scoreText(mean)}${by === null ? "" : ` \u00b1 ${short(by, 2)}`}`;
  const rows = pairs.map((pair) => el("tr", {},
    el("th", { scope: "row" }, `${pair.second} minus ${pair.first}`,
      el("span", { class: "quiet" }, ` ${pair.metric}`)),
    cell("Seeds", pair.seeds.join(", ")),
    cell("Means", `${pair.first} ${spread(pair.first_mean, pair.first_spread)}`, el("br"),
      `${pair.second} ${spread(pair.second_mean, pair.second_spread)}`),
    cell("Mean difference", signed(pair.difference, 4)),
    cell("95% interval", pair.low === null
      ? el("span", { class: "quiet" }, pair.seeds.length < 3 ? "needs three seeds" : "none: all differences are equal")
      : `${signed(pair.low, 4)} to ${signed(pair.high, 4)}`)));
  return el("div", { id: "pairs" },
    el("h3", {}, "Differences over paired seeds"),
    el("p", { class: "quiet" }, "Each run is compared with the run of the same seed. The interval is the 95% "
      + "confidence interval of the mean difference (paired t); one that contains zero shows no difference."),
    framed("Differences over paired seeds", plainTable("stack numbers", heads, rows)));
};

// Reads the data that stands in the page and draws every section.

let shownData = null; // a served page gets new data while it is open

const renderAll = (data) => {
  shownData = data;
  styleRuns(data);
  const names = data.runs.map((run) => run.name);
  $("title").textContent = names.length < 4 ? new Intl.ListFormat("en").format(names) : `${names.length} runs`;
  document.title = `${$("title").textContent} \u2013 acmoe report`;
  $("subtitle").textContent = names.length === 1 ? "One run" : `Differences are relative to ${names[0]}, the first run`;
  $("made").textContent = `Written by acmoe ${data.acmoe} on ${data.made}. `
    + (data.version ? "Served on this machine only." : "This file needs no network and no other file.");
  renderSummary(data);
  renderReading(data);
  renderCurves(data);
  renderExplorer(data);
  renderLayers(data);
  renderRobustness(data);
  renderSettings(data);
  renderProvenance(data);
};

const pageData = JSON.parse($("data").textContent);
startTheme();
readLink(pageData);
renderAll(pageData);
if (location.hash.includes("=")) followLink(pageData, false);
startLinks(() => shownData);
startExport(() => shownData);
if (pageData.version) startLive(pageData);

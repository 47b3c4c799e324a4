// Reads the data that stands in the page and draws every section.

const renderAll = (data) => {
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
renderAll(pageData);
if (pageData.version) startLive(pageData);

// Reads the data that stands in the page and draws every section.

const renderAll = (data) => {
  const names = data.runs.map((run) => run.name);
  $("title").textContent = names.length < 4 ? new Intl.ListFormat("en").format(names) : `${names.length} runs`;
  document.title = `${$("title").textContent} \u2013 acmoe report`;
  $("subtitle").textContent = names.length === 1 ? "One run" : `Differences are taken against ${names[0]}`;
  $("made").textContent = `Made by acmoe ${data.acmoe}, ${data.made}. `
    + (data.version ? "Served by this machine, to this machine." : "One file, which asks no network for anything.");
  renderSummary(data);
  renderReading(data);
  renderCurves(data);
  renderExplorer(data);
  renderLayers(data);
  renderRobustness(data);
  renderSettings(data);
};

const pageData = JSON.parse($("data").textContent);
startTheme();
renderAll(pageData);
if (pageData.version) startLive(pageData);

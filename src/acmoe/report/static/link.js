// The view in the address: "#run=adaptive&layer=2&token=5" opens the page there. Numbers are those that the page
// shows. A value that does not fit this report is ignored. A fragment without "=" is the name of a section.

const numberIn = (text, least, most) => {
  if (text === null || !/^\d{1,7}$/.test(text)) return null;
  return Number(text) >= least && Number(text) <= most ? Number(text) : null;
};

/** The address of the present view with some fields changed; `part` is "token" or "expert". */
const linkTo = (data, changes = {}, part = "token") => {
  const view = { ...explorerView, figure: curvesView.metric, x: curvesView.x, ...changes };
  const fields = new URLSearchParams();
  if (view.run !== null) {
    fields.set("run", data.runs[view.run].name);
    fields.set("layer", view.layer + 1);
    if (part === "expert") fields.set("expert", view.expert);
    else if (view.token !== null) fields.set("token", view.token + 1);
    if (view.by !== NEW_VIEW.by) fields.set("by", view.by);
  }
  if (view.figure !== null && view.figure !== curveKeys(data)[0]) fields.set("figure", view.figure);
  if (view.x !== "step") fields.set("against", view.x);
  return `#${fields}`;
};

/** Put the present view into the address, as a new entry of the browser's history. */
const keepLink = (data, part = "token") => {
  const link = linkTo(data, {}, part);
  if (link === location.hash) return;
  try { history.pushState(null, "", link); } catch { /* some browsers allow only so many entries at a time */ }
};

/** Take the view from the address. Return the id of the section that it is about, or null. */
const readLink = (data) => {
  const text = location.hash.slice(1);
  if (text && !text.includes("=")) return null;
  const fields = new URLSearchParams(text);
  const keys = curveKeys(data);
  curvesView.metric = keys.includes(fields.get("figure")) ? fields.get("figure") : keys[0] ?? null;
  curvesView.x = fields.get("against") === "seconds" ? "seconds" : "step";
  const run = data.runs.findIndex((one) => one.routing !== null && one.name === fields.get("run"));
  explorerView.run = run >= 0 ? run : startRun(data);
  if (explorerView.run === null) return null;
  const { layers } = data.runs[explorerView.run].routing;
  const depth = numberIn(fields.get("layer"), 1, layers.length);
  explorerView.layer = depth === null ? Math.min(NEW_VIEW.layer, layers.length - 1) : depth - 1;
  const layer = layers[explorerView.layer];
  const token = numberIn(fields.get("token"), 1, layer.first.length);
  const expert = numberIn(fields.get("expert"), 0, layer.experts - 1);
  explorerView.by = fields.get("by") === "cluster" ? "cluster" : NEW_VIEW.by;
  explorerView.only = null;
  if (token !== null) explorerView.token = token - 1;
  if (expert !== null) explorerView.expert = expert;
  if (!text) Object.assign(explorerView, { token: NEW_VIEW.token, expert: NEW_VIEW.expert });
  if (expert !== null) return "experts";
  return token !== null || depth !== null || run >= 0 ? "explorer" : null;
};

/** The first adaptive run with a routing, else the first run with one. */
const startRun = (data) => {
  const able = data.runs.map((_, index) => index).filter((index) => data.runs[index].routing !== null);
  return able.find((index) => data.runs[index].router === "adaptive") ?? able[0] ?? null;
};

/** Draw the view of the address, and scroll to its section unless that is in sight. */
const followLink = (data, focus) => {
  if (location.hash && !location.hash.includes("=")) return;
  const section = readLink(data);
  renderCurves(data);
  renderExplorer(data);
  if (section === null) return;
  const box = $(section).getBoundingClientRect();
  if (box.top < 0 || box.top > innerHeight / 2) $(section).scrollIntoView({ behavior: "instant" });
  const led = section === "experts" ? `pick-${explorerView.expert}` : `token-${explorerView.token}`;
  if (focus) $(led)?.focus({ preventScroll: section === "experts" });
};

const startLinks = (data) => {
  addEventListener("hashchange", () => {
    // A link that was followed is gone after drawing: the focus goes to what it led to.
    followLink(data(), document.activeElement?.closest("#explorer, #experts") !== null);
  });
};

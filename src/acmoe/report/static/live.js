// News from the server this page came from: asked for every two seconds, drawn in place.

const PAUSE = 2000; // milliseconds

const startLive = (data) => {
  let { version } = data;
  const status = $("live");
  status.hidden = false;
  status.textContent = "live";
  const ask = async () => {
    try {
      const found = await (await fetch("/version")).json();
      if (found !== version) {
        const fresh = await (await fetch("/data.json")).json();
        version = fresh.version;
        keepingFocus(() => renderAll(fresh));
        status.textContent = `live, ${new Date().toLocaleTimeString()}`;
      } else if (status.dataset.lost) status.textContent = "live";
      delete status.dataset.lost;
    } catch {
      status.dataset.lost = "true";
      status.textContent = "the server does not answer; trying again";
    }
    setTimeout(ask, PAUSE);
  };
  setTimeout(ask, PAUSE);
};

/** Sections are built anew: what was focused and scrolled to is found again by its id. */
const keepingFocus = (draw) => {
  const id = document.activeElement?.id;
  const place = [window.scrollX, window.scrollY];
  const inner = $("explorer-tokens")?.firstElementChild?.scrollTop ?? 0;
  draw();
  if (id) $(id)?.focus({ preventScroll: true });
  if ($("explorer-tokens")?.firstElementChild) $("explorer-tokens").firstElementChild.scrollTop = inner;
  window.scrollTo(...place);
};

// Clean images beside attacked ones: the same patches, and where the attack sends them.

/** What the page says about the attack of a run; null where there is nothing to say. */
const aboutAttack = (routing, depth) => {
  const { attacked } = routing;
  if (attacked === null) return null;
  if (typeof attacked === "string") return `Not shown under attack: ${attacked}.`;
  const { how, count, right, right_attacked: kept, layers } = attacked;
  return `Right of each image: the same one after an attack on this run (${how}, one gradient step). Patches whose `
    + `first expert it changes have a dashed frame: ${fixed(layers[depth].moved, 1)}% of the patches of ${count} `
    + `images at this layer. Of these images ${right} are classified correctly before the attack and ${kept} after it. `
    + "To measure robustness, use acmoe attack with PGD.";
};

/** The overlay of an attacked image. Its cells mirror those of the clean one; a click chooses the clean patch. */
const attackedStage = (attacked, image, [rows, columns]) => {
  const patches = el("div", { class: "patches", "aria-hidden": true });
  patches.style.setProperty("--columns", String(columns));
  for (let n = 0; n < rows * columns; n += 1) {
    patches.append(el("span", { class: "twin", "data-place": image * rows * columns + n }));
  }
  return el("div", { class: "stage" }, el("img", { src: attacked.images[image], alt: "" }), patches);
};

/** Colour the twins by their expert under attack and frame those that moved. */
const colourTwins = (node, layer, clean, only) => {
  node.querySelectorAll(".twin").forEach((twin) => {
    const place = Number(twin.dataset.place);
    const expert = layer.first[place];
    paint(twin, expert);
    twin.dataset.expert = String(expert);
    twin.classList.toggle("moved", expert !== clean.first[place]);
    twin.classList.toggle("dim", only !== null && expert !== only);
    twin.title = `attacked: expert ${expert}`;
  });
};

/** Where a patch goes under attack, for the details. */
const attackedBlock = (routing, depth, token) => {
  if (routing.attacked === null || typeof routing.attacked === "string") return null;
  const { attacked } = routing;
  const layer = attacked.layers[depth];
  const clean = routing.layers[depth];
  if (token >= layer.first.length) return null;
  const { image } = patchPlace(token, clean.grid);
  const same = layer.first[token] === clean.first[token];
  return block("Under attack", el("p", {}, chip(layer.first[token], `expert ${layer.first[token]}`),
    ` gate ${fixed(layer.gate[token], 3)}. ${same ? "The first expert stays the same." : "The first expert changes."} `
    + `The attacked image is classified as ${attacked.predicted[image]}.`));
};

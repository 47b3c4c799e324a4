// Every text of the page whose contrast with what lies behind it is below 4.5 to 1: texts of HTML and SVG, of selects,
// and texts that a style puts before or after an element. Opacity counts as part of the text's colour.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const mixed = (colors) => {
    canvas.fillStyle = "white"; canvas.fillRect(0, 0, 1, 1);
    for (const [color, alpha] of colors) {
      canvas.globalAlpha = alpha;
      canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    }
    canvas.globalAlpha = 1;
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (levels) => {
    const part = levels.map((level) => {
      const share = level / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const upwards = (node) => {
    const found = [];
    for (let at = node; at; at = at.parentElement) found.unshift(at);
    return found;
  };
  const known = new Map(); // many tokens have the same colours
  const ratio = (node, pseudo) => {
    const chain = upwards(node).map((one) => getComputedStyle(one));
    const style = getComputedStyle(node, pseudo);
    const behind = (pseudo ? [...chain, style] : chain).map((one) => [one.backgroundColor, 1]);
    const opacity = (pseudo ? [...chain, style] : chain).reduce((all, one) => all * Number(one.opacity), 1);
    const color = node instanceof SVGElement ? style.fill : style.color;
    const key = JSON.stringify([behind, opacity, color]);
    if (!known.has(key)) {
      const [a, b] = [light(mixed([...behind, [color, opacity]])), light(mixed(behind))];
      known.set(key, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    }
    return known.get(key);
  };
  const own = (node) => node.tagName === "SELECT"
    || [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const added = (node, pseudo) => {
    const { content } = getComputedStyle(node, pseudo);
    return /^"\s*\S/.test(content);
  };
  // A transparent text is repeated for narrow screens only; an option is drawn by the system.
  const seen = (node) => node.getClientRects().length && getComputedStyle(node).visibility !== "hidden"
    && !node.closest(".unseen, .skip, noscript, script, style, option, title, .again");
  const every = [...document.body.querySelectorAll("*")].filter(seen);
  const texts = every.flatMap((node) => [
    ...(own(node) ? [[node, null]] : []),
    ...["::before", "::after"].filter((pseudo) => added(node, pseudo)).map((pseudo) => [node, pseudo]),
  ]);
  return texts.map(([node, pseudo]) => [ratio(node, pseudo),
    `${node.tagName}.${node.getAttribute("class")}${pseudo ?? ""} ${node.textContent.slice(0, 30)}`])
    .filter(([found]) => found < 4.5);
})()

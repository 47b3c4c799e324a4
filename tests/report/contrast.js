// Every text of the page whose contrast with what lies behind it is below 4.5 to 1.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const part = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((level) => {
      const share = level / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const behind = (node) => {
    const stack = [];
    for (let at = node; at; at = at.parentElement) {
      stack.unshift(getComputedStyle(at).backgroundColor);
    }
    return stack;
  };
  const ratio = (node) => {
    let ground = "white";
    for (const color of behind(node)) {
      canvas.fillStyle = ground; canvas.fillRect(0, 0, 1, 1);
      canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
      ground = `rgb(${[...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).join(" ")})`;
    }
    const [a, b] = [light(getComputedStyle(node).color, ground), light(ground, ground)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const seen = (node) => node.getClientRects().length && !node.closest(".unseen, .skip, noscript");
  return [...document.body.querySelectorAll("*")].filter((node) =>
    node instanceof HTMLElement && own(node) && seen(node) && !node.classList.contains("again"))
    .map((node) => [ratio(node), `${node.tagName}.${node.className} ${node.textContent.slice(0, 30)}`])
    .filter(([found]) => found < 4.5);
})()

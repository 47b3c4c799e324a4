"""A page in a headless Chromium that records what a page without a network must not do."""

from pathlib import Path
from typing import Any

CONTRAST = (Path(__file__).parent / "report" / "contrast.js").read_text(encoding="utf-8")
PHONE = {"width": 390, "height": 844}


class Watched:
    """One open page, with its console messages, errors, dialogs and requests."""

    def __init__(
        self, browser: Any, address: str, *, ready: str = "#settings table", **context: Any
    ) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, **context}
        )
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector(ready)

    def check_quiet(self, address: str) -> None:
        """Check that the page logged nothing and requested nothing but itself and its own data."""
        own = ("data:", "blob:")
        asked = {url.partition("#")[0] for url in self.requests if not url.startswith(own)}
        assert self.wrong == []
        assert asked == {address.partition("#")[0]}

    def hash(self) -> str:
        return str(self.page.evaluate("decodeURIComponent(location.hash)"))


# Controls that a pointer can hit. Tokens inside a text are as large as its letters, and arrow keys
# reach them; a range is measured as a whole.
SMALL_CONTROLS = """
[...document.querySelectorAll("button, select, input, summary, a[href], .image .token")]
  .filter((node) => node.getClientRects().length && !node.closest(".skip")).map((node) => {
  const box = node.getBoundingClientRect();
  return [Math.round(10 * box.width) / 10, Math.round(10 * box.height) / 10,
    `${node.tagName} ${node.id || node.textContent.slice(0, 20)}`];
}).filter(([width, height]) => width < 24 || height < 24)
"""
# In the order of the document: what Tab must reach.
TAB_STOPS = """
[...document.querySelectorAll("button, select, input, summary, a[href], [tabindex]")]
  .filter((node) => node.tabIndex >= 0 && node.getClientRects().length && !node.disabled)
"""
FOCUSED = """
(() => {
  const node = document.activeElement, style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [TAB_STOPS.indexOf(node), ring && box.width > 0, node.outerHTML.slice(0, 80)];
})()
""".replace("TAB_STOPS", TAB_STOPS.strip())

"""Opens the status page in Chromium and writes down what is seen there, as JSON.

Run in a network namespace of its own, whose loopback it brings up: nothing can be fetched
from elsewhere there, so what is seen needs nothing from elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import chromium
import served

WIDTHS = (360, 1024, 1920)
# For each bar and plot of SVG: its name for those who do not see it, and its parts on the screen.
DRAWN = """[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return {title: svg.querySelector('title').textContent, role: svg.getAttribute('role'),
    within: svg.closest('article')?.querySelector('h3 bdi').innerText ?? '',
    box: [box.left, box.right, box.width, box.height],
    parts: [...svg.querySelectorAll('rect, path')].map(p => {
      const of = p.getBoundingClientRect();
      return {width: of.width, height: of.height, fill: getComputedStyle(p).fill}; })};
})"""
# The lowest contrast of a text with what is behind it (WCAG 2.1), and the text.
CONTRAST = """(() => {
  const light = of => {
    const [r, g, b] = of.match(/[\\d.]+/g).map(n => n / 255)
      .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => {
    const of = getComputedStyle(e).backgroundColor;
    return of === 'rgba(0, 0, 0, 0)' ? behind(e.parentElement) : of; };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = [];
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (own && !e.closest('svg'))
      found.push([ratio(light(getComputedStyle(e).color), light(behind(e))), e.innerText]);
    if (e.matches('svg rect, svg path'))
      // What is drawn is enough at 3:1.
      found.push([1.5 * ratio(light(getComputedStyle(e).fill), light(behind(e))), e.outerHTML]);
  }
  return found.reduce((a, b) => a[0] < b[0] ? a : b);
})()"""


def main() -> None:
    """The findings go to standard output."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        served.page("trixie-e1000e", rename=served.EVIL, recent=served.made_up) as url,
        chromium.tab(Path(place)) as tab,
    ):
        tab.size(1280, 900)
        tab.go(url)
        found = {
            "url": url,
            "title": tab.ask("document.title"),
            "text": tab.ask("document.body.innerText"),
            "headings": tab.ask("[...document.querySelectorAll('h2')].map(h => h.innerText)"),
            "guests": tab.ask("[...document.querySelectorAll('h3 bdi')].map(g => g.innerText)"),
            "cpus": tab.ask("[...document.querySelectorAll('.cpus > li')].map(c => c.innerText)"),
            "drift": tab.ask("[...document.querySelectorAll('#drift td')].map(c => c.innerText)"),
            "plan": tab.ask("document.querySelector('#plan').innerText"),
            "scripts": tab.ask("document.scripts.length + document.images.length"),
            "links": tab.ask("[...document.links].map(a => a.href)"),
        }
        background = "getComputedStyle(document.body).backgroundColor"
        found["views"] = []
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            found[scheme] = tab.ask(background)
            for width in WIDTHS:
                tab.size(width, 800)
                tab.go(url)
                overflow = tab.ask("document.documentElement.scrollWidth - innerWidth")
                view = {"width": width, "scheme": scheme, "overflow": overflow}
                found["views"].append(
                    view | {"drawn": tab.ask(DRAWN), "contrast": tab.ask(CONTRAST)}
                )
        found["requests"] = tab.requests()
        found["complaints"] = tab.complaints()
        tab.go(f"{url}status.json")
        found["data"] = json.loads(tab.ask("document.body.innerText"))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

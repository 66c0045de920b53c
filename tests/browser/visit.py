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


def main() -> None:
    """The findings go to standard output."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        served.page("trixie-e1000e", rename=served.EVIL) as url,
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
        for scheme in ("light", "dark"):
            tab.scheme(scheme)
            found[scheme] = tab.ask(background)
        tab.size(380, 800)
        tab.go(url)
        found["overflow"] = tab.ask("document.documentElement.scrollWidth - innerWidth")
        found["requests"] = tab.requests()
        found["complaints"] = tab.complaints()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

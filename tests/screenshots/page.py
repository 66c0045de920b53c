"""Writes docs/images/status-page.png: the status page of a recorded host, in Chromium."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO / "tests/browser")]

import chromium  # noqa: E402
import picture  # noqa: E402
import served  # noqa: E402

PICTURE = REPO / "docs/images/status-page.png"
WIDTH, HEIGHT = 1040, 1500


def main() -> None:
    """Raises RuntimeError when Chromium is not installed."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        served.page("bookworm-veth-plain") as url,
        chromium.tab(Path(place)) as tab,
    ):
        tab.scheme("light")
        tab.size(WIDTH, HEIGHT)
        tab.go(url)
        PICTURE.parent.mkdir(exist_ok=True)
        tab.picture(PICTURE)
    picture.check(PICTURE)


if __name__ == "__main__":
    main()

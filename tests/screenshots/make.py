"""Writes docs/images/status-page.png: the status page of a recorded host, in Chromium."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path += [str(REPO), str(REPO / "tests/browser")]

import chromium  # noqa: E402
import served  # noqa: E402

PICTURE = REPO / "docs/images/status-page.png"
WIDTH, HEIGHT = 1040, 1500
# More than this would weigh on every clone.
MOST = 200_000


def main() -> None:
    """Raises RuntimeError when Chromium is not installed, SystemExit when the picture is too
    large."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
        served.page("bookworm-veth-plain") as url,
        chromium.tab(Path(place)) as tab,
    ):
        tab.scheme("light")
        tab.size(WIDTH, HEIGHT)
        tab.go(url)
        tab.picture(PICTURE)
    size = PICTURE.stat().st_size
    if size > MOST:
        raise SystemExit(f"{PICTURE.name} has {size} bytes, more than {MOST}")
    print(f"{PICTURE.relative_to(REPO)}: {size} bytes")


if __name__ == "__main__":
    main()

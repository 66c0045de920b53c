"""The pictures of the documents, made anew: `make screenshots`, or the names of some.

Each module of PICTURES writes one file of docs/images from a recorded host.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PICTURES = {"top": "top_picture", "page": "page", "dashboard": "dashboard"}

sys.path.append(str(Path(__file__).resolve().parents[2]))


def main(names: list[str]) -> None:
    """Make these pictures, all when none is named."""
    for name in names or PICTURES:
        if name not in PICTURES:
            raise SystemExit(f"{name}: no such picture; there are {', '.join(PICTURES)}")
        importlib.import_module(PICTURES[name]).main()


if __name__ == "__main__":
    main(sys.argv[1:])

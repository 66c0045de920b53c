"""``python3 -m experiments``: make the runs that are missing, then the pages.

From tests/, or by `make results`. Results are kept in docs/results/raw; a run that has
its file there is not made again unless --again names its figure.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from experiments.plan import TREE

sys.path.insert(0, str(TREE))

from experiments import found, lab, page
from experiments.figures import FIGURES

DOCS = TREE / "docs" / "results"


def _named(text: str, names: list[str]) -> list[str]:
    """Figures of a list; `napi` stands for all whose names begin with "napi-"."""
    found = []
    for word in filter(None, text.split(",")):
        family = [name for name in names if name.startswith(f"{word}-")]
        found += [word] if word in names or not family else family
    return found


def main() -> int:
    names = [figure.id for figure in FIGURES]
    parser = argparse.ArgumentParser(prog="experiments", description=__doc__)
    add = parser.add_argument
    add("--figures", metavar="ID,...", help=f"only these of {', '.join(names)}")
    add("--again", metavar="ID,...", default="", help="measure these anew, or all")
    add("--budget", type=int, default=3000, metavar="S", help="seconds of runs in a boot (3000)")
    add("--page", action="store_true", help="measure nothing, only write the pages")
    add("--list", action="store_true", help="what there is to do, and how long it may take")
    add("--docs", type=Path, default=DOCS, metavar="DIR", help="where to (docs/results)")
    arguments = parser.parse_args()
    wanted = _named(arguments.figures, names) if arguments.figures else names
    again = wanted if arguments.again == "all" else _named(arguments.again, names)
    unknown = {*wanted, *again} - set(names)
    if unknown:
        parser.error(f"no such figure: {', '.join(sorted(unknown))}")
    figures = [figure for figure in FIGURES if figure.id in wanted]
    raw = arguments.docs / "raw"
    for name in again:
        shutil.rmtree(raw / name, ignore_errors=True)
    if arguments.list:
        for key, run in lab.missing(figures, raw):
            print(
                f"{key:32} {run.boot.name:9} {run.trials:4} trials, {run.expected_seconds:4.0f} s"
            )
        return 0
    good = arguments.page or lab.make(figures, raw, arguments.budget)
    page.write(FIGURES, arguments.docs)
    found.write(FIGURES, arguments.docs)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

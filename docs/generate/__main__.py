"""Write every generated file of docs/, and say which ones changed.

`python -m generate green [DIR]` first records which promises' tests passed, by the JUnit reports
below DIR: without it, by those of the last runs of tests/run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generate import promises
from generate.files import DOCS, contents

words = sys.argv[1:]
if words:
    if words[0] != "green" or len(words) > 2:
        sys.exit("usage: python -m generate [green [DIR]]")
    place = Path(words[1]) if words[1:] else promises.RUNS
    reports = list(place.rglob("junit.xml"))
    if not reports:
        sys.exit(f"no junit.xml below {place}")
    sys.stdout.write("".join(f"{test}: green\n" for test in promises.take(reports)))
changed = []
for path, text in contents().items():
    file = DOCS / path
    if not file.exists() or file.read_text("utf-8") != text:
        Path(file).write_text(text, "utf-8")
        changed.append(path)
sys.stdout.write("".join(f"docs/{path}: written\n" for path in changed) or "all are current\n")

"""Write every generated file of docs/, and say which ones changed."""

from __future__ import annotations

import sys
from pathlib import Path

from generate.files import DOCS, contents

changed = []
for path, text in contents().items():
    file = DOCS / path
    if not file.exists() or file.read_text("utf-8") != text:
        Path(file).write_text(text, "utf-8")
        changed.append(path)
sys.stdout.write("".join(f"docs/{path}: written\n" for path in changed) or "all are current\n")

"""``python3 -m nslab SPEC OUT``: make one run of namespace routers, in the lab."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from . import measure
from .spaces import Failure


def main() -> int:
    spec, out = map(Path, sys.argv[1:3])
    wanted = json.loads(spec.read_text(encoding="utf-8"))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        found = measure.run(wanted, lambda text: print(f"nslab: {text}", flush=True))
    except (Failure, OSError) as error:
        print(f"nslab: {error}", file=sys.stderr)
        return 1
    head = {key: wanted[key] for key in ("bed", "configurations", "seed", "seconds", "pairs")}
    out.write_text(json.dumps({"run": head, "started": started, **found}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

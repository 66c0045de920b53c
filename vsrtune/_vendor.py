"""The QMP library where the distribution has none (Debian 12)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

DIRECTORY = "/usr/lib/vsrtune/vendor"


def qemu_qmp() -> Any:
    """The module ``qemu.qmp``: the system's, else the one shipped with vsrtune.

    Raises ImportError when there is neither.
    """
    try:
        return importlib.import_module("qemu.qmp")
    except ImportError:
        if DIRECTORY not in sys.path:
            sys.path.append(DIRECTORY)
        importlib.invalidate_caches()
        return importlib.import_module("qemu.qmp")

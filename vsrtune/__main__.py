# SPDX-License-Identifier: GPL-2.0-or-later
"""``python3 -m vsrtune``."""

from vsrtune.cli.main import main

main()

# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: shell. The ``vsrtune`` command: a module for each subcommand, its options, the display
of its tables."""

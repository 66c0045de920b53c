# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Turns a snapshot and policies into ordered actions: requirements, CPUs, scheduling
classes, refusals, and the invariants of every plan."""

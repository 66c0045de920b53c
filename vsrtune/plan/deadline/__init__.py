# SPDX-License-Identifier: GPL-2.0-or-later
"""Root domains for SCHED_DEADLINE: their CPUs, how they are made, and whether budgets fit."""

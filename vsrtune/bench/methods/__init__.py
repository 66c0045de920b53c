# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. The order of trials: runs, comparisons, searches for a rate."""

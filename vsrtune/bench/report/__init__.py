# SPDX-License-Identifier: GPL-2.0-or-later
"""Stores and shows runs: results, tables, plots, a page."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Puts back what a run has changed, however the run ended."""

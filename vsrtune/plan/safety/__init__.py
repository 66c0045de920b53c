# SPDX-License-Identifier: GPL-2.0-or-later
"""The invariants of a plan, and the signs that a plan has done harm."""

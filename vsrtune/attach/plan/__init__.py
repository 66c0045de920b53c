# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. The switches that operators and policies ask for, and the steps of each."""

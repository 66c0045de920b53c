# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. The checks of ``vsrtune doctor``, and their findings."""

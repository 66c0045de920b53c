# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Views for the operator: tables, the status page, ``top``, metric families."""

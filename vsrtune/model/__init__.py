# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Values that several packages share: the host, guests and a snapshot of both, targets
and plans, journal records, the daemon's state after a pass."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: writing. Moves guests' interfaces between macvtap and our devices, and back: the
transaction, its ledger, and its primitive calls."""

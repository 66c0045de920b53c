# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: reading. The facts that checks need beside a snapshot."""

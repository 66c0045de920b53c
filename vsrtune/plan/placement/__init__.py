# SPDX-License-Identifier: GPL-2.0-or-later
"""Which thread gets which CPU where a policy says ``auto``."""

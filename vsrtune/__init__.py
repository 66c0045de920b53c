# SPDX-License-Identifier: GPL-2.0-or-later
"""vsrtune: tunes KVM hosts that run virtual routers, and undoes it exactly."""

__version__ = "0.1.0"

# SPDX-License-Identifier: GPL-2.0-or-later
"""Events that wake the daemon: libvirt, links, and settings and policy files read by polling."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Events that wake the daemon: libvirt, links, policy files, and settings read by polling."""

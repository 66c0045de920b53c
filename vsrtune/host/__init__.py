# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: reading. One module per interface of the host: /proc, cgroups, network devices, route
netlink, libvirt, QMP, the scheduler; live or recorded."""

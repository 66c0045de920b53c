# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: reading. One snapshot of the host: guests with their threads and devices, decisions on
which processes are guests, loads, traces, recordings, policy files."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: shell. Keeps a host tuned until it is stopped: the loop, its passes, their memory,
events, systemd, HTTP."""

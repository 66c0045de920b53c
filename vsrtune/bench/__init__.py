# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: shell. The router tester: measures routers and compares configurations."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Shared by all packages: errors and exit codes, CPU lists, JSON of frozen
dataclasses, limits for foreign text, retries, statistics."""

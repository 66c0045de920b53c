# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Policies: the schema of a file, its reader and its errors, which guest gets which
policy."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Specifications of measurements: their values, reader and schema."""

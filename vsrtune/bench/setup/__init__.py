# SPDX-License-Identifier: GPL-2.0-or-later
"""Applies a configuration: attachments, bridges, numbers of guests, tuning."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""``vsrtune try``: tuned and untuned turns, their ratio, and the guardian that puts the host
back."""

# SPDX-License-Identifier: GPL-2.0-or-later
"""The guard: samples tuned guests, and steps a guest down when its tuning does harm."""

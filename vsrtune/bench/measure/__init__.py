# SPDX-License-Identifier: GPL-2.0-or-later
"""The counts of a trial: frames, CPU time, threads."""

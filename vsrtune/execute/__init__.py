# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: writing. Executes plans, journals them, undoes them; the writers of each setting."""

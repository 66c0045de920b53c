# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: writing. Sends and counts frames: the generator, the sink, the agent that runs them."""

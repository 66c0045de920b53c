# SPDX-License-Identifier: GPL-2.0-or-later
"""Wall: pure. Several guests as one router: group files, members, parallel and multistage
routers, members made from a template."""

"""``python3 -m vsrtune``."""

from vsrtune.cli import main

main()

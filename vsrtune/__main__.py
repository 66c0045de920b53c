"""``python3 -m vsrtune``."""

from vsrtune.cli.main import main

main()

"""Wall: shell. The ``vsrtune`` command: a module for each subcommand, its options, the display
of its tables."""

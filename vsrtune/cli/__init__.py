"""Wall: shell. The ``vsrtune`` command: a module for each subcommand, its options, how its
tables look."""

"""Makes those parts of docs/ that the code knows: `make docs`."""

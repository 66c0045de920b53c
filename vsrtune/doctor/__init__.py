"""Wall: pure. The checks of ``vsrtune doctor``, and their findings."""

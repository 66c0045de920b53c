"""Wall: pure. What ``vsrtune doctor`` checks, and what it says of it."""

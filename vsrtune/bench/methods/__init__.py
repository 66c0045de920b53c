"""Wall: pure. How trials are ordered: runs, comparisons, searches for a rate."""

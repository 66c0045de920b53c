"""Wall: pure. The order of trials: runs, comparisons, searches for a rate."""

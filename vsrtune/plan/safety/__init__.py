"""The invariants of a plan, and the signs that a plan has done harm."""

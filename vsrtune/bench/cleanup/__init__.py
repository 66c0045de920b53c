"""Puts back what a run has changed, however it ended."""

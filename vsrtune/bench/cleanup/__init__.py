"""Puts back what a run has changed, however the run ended."""

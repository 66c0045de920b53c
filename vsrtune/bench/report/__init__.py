"""Stores and shows runs: results, tables, plots, a page."""

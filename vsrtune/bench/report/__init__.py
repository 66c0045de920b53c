"""What of a run is kept and shown: results, tables, plots, a page."""

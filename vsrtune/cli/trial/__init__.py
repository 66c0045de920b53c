"""``vsrtune try``: tuned and untuned turns, their ratio, and the guardian that puts the host
back."""

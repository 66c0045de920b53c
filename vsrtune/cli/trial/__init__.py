"""``vsrtune try``: turns of tuned and untuned, their ratio, and the guardian that puts the
host back."""

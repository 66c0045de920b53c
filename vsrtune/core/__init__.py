"""Wall: pure. What every package uses: errors and exit codes, CPU lists, JSON of frozen
dataclasses, limits for text that others wrote, retries, statistics."""

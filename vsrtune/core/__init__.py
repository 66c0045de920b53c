"""Wall: pure. Shared by all packages: errors and exit codes, CPU lists, JSON of frozen
dataclasses, limits for foreign text, retries, statistics."""

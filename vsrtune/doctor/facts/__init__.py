"""Wall: reading. What the checks need beside a snapshot."""

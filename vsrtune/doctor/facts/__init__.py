"""Wall: reading. The facts that checks need beside a snapshot."""

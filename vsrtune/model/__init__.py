"""Wall: pure. Values that several packages share: the host, guests and a snapshot of both,
targets and plans, records of the journal, what the daemon knows after a pass."""

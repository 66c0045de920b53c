"""Wall: writing. Moves guests' interfaces between macvtap and our devices, and takes it back:
the transaction, its ledger, and what it writes with."""

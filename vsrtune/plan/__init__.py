"""Wall: pure. Turns a snapshot and policies into ordered actions: requirements, CPUs, scheduling
classes, refusals, and the invariants of every plan."""

"""Wall: pure. From a snapshot and policies to ordered actions: what the policies require, which
CPUs, which classes, what is refused, and the invariants of every plan."""

"""The guard: samples tuned guests, and steps a guest down when its tuning does harm."""

"""Watches what the daemon did, and steps a guest down when its tuning does harm."""

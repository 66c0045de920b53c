"""The router tester: offered load in, forwarded load out, and where the rest went."""

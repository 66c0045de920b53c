"""Wall: shell. The router tester: measures routers and compares configurations."""

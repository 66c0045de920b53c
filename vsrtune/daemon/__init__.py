"""Wall: shell. Keeps a host tuned until it is stopped: the loop, one pass of it, what it
remembers between passes, systemd, HTTP."""

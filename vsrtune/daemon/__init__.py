"""Wall: shell. Keeps a host tuned until it is stopped: the loop, its passes, their memory,
events, systemd, HTTP."""

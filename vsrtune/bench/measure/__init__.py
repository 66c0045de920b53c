"""The counts of a trial: frames, CPU time, threads."""

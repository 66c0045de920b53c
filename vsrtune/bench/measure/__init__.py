"""What a trial counts: frames, CPU time, threads."""

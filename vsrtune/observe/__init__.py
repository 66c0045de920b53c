"""Wall: reading. The host as one snapshot: guests with their threads and devices, who is who,
loads and traces, recordings."""

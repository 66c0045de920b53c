"""What a plan may never do, and what shows that one has done harm."""

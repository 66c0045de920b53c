"""Wall: pure. What is measured: the values of a specification, its reader, its schema."""

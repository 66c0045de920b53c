"""Wall: pure. The switches that operators and policies ask for, and the steps of each."""

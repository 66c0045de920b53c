"""Wall: pure. Which switches are asked for, and the steps of each."""

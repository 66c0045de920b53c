"""Wall: pure. Policies: what a file may say, its reader and its errors, which guest gets which
policy."""

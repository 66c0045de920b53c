"""Wall: pure. What an operator is shown: tables, the status page, ``top``, metric families."""

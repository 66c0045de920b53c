"""Wall: pure. Views for the operator: tables, the status page, ``top``, metric families."""

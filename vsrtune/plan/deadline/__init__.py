"""Root domains for SCHED_DEADLINE: which CPUs, made how, and whether the budgets fit."""

"""Which thread gets which CPU where a policy says ``auto``."""

"""Which thread gets which CPU where a policy says ``auto``: by number, or by measured load."""

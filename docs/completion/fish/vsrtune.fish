# Completion of vsrtune(8) in fish: what the command itself offers.
_VSRTUNE_COMPLETE=fish_source vsrtune | source

"""Wall: writing. Carries a plan out, journals it, takes it back; the writers of each setting."""

"""Wall: writing. Executes plans, journals them, undoes them; the writers of each setting."""

"""What a run was and what came out of it, as a page; and two runs beside each other."""

"""`napkin evaluate` in its forms, and `napkin contamination`."""

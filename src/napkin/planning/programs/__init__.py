"""A program of the user's own, under torch's own parallelism, traced on the ranks that differ."""

"""Running a pipeline of stages over shards: workers, corpus folders, plans from samples, samples to read."""

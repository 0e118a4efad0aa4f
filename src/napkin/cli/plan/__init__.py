"""Commands that say what a run will take before it starts."""

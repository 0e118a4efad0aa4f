"""An unmodified training script, run without a GPU until its step has been counted."""

"""Plans by rules of thumb, without a model."""

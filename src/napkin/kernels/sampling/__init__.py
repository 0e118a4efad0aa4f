"""Drawing a token from a row of logits: the compiled form of what `napkin.inference.sampling` defines."""

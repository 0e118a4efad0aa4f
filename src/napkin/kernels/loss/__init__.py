"""The loss of a language model's head and the log-probabilities of given tokens, without holding all logits."""

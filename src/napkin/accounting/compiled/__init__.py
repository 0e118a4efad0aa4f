"""Counting what torch.compile makes of a step: Inductor's own programs, run on fake tensors."""

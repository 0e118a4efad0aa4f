"""Commands on many runs: sweeps, ladders, the transfer of learning rates."""

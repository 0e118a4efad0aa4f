"""The first commands: what this machine has, a demo, completion in a shell."""

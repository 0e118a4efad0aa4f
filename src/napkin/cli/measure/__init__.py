"""Commands that time this machine: operators, steps, collectives, servers."""

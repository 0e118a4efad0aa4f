"""The shared parts of all commands: options and their help, the terminal, progress, files."""

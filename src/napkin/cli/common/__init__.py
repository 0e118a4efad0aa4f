"""What all commands share: options and their help, the terminal, progress, files."""

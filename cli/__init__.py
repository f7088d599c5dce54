"""The `millrace` command: one file a command."""

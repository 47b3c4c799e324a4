"""Parse the arguments of a command, and print its help page."""

"""The commands that read a run: `acmoe COMMAND RUN`."""

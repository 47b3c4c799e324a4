"""One self-contained HTML page of several runs: figures, routing and what they can show."""

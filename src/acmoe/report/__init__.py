"""Write one self-contained HTML page that compares runs: curves, routing, and how to read them."""

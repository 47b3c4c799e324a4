"""Hidden states in, who goes where out. Start with adaptive.py: the paper in a hundred lines."""

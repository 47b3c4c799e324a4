"""Linear maps whose input gradient covers the newest positions only."""

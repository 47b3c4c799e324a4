"""Train two routers side by side, each in a process of its own, and compare them."""

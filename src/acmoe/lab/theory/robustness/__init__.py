"""Lemmas 1 and 2 and Proposition 1: distances between clusters, and errors of routers."""

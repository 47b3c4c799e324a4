"""Figures of routing. Each module holds one figure: a function that takes arrays and writes files.

Equal input gives byte-identical files. No figure relies on colour alone: numbers, markers or
hatches tell experts apart as well.
"""

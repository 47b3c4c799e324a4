"""Figures of routing: one module a figure, each a function of plain arrays that writes two files.

Equal input gives equal bytes. Colour is never alone: numbers, marks or hatches tell experts apart
as well.
"""

"""Figures from measurements. The only room that draws, and only when asked."""

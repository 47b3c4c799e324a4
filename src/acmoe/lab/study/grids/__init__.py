"""The declared grids: settings, conditions and seeds of every study but the synthetic one."""

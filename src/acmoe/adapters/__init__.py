"""Our models for other libraries, and other libraries' models for us."""

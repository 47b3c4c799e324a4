"""Files that survive crashes and show damage: atomic writes, sealed JSON, logs, locks."""

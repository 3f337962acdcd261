"""All that goes through Redis: keys, scripts and the operations on them. Nothing else names a key."""

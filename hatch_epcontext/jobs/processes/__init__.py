"""The processes that answer requests: how they are started, watched, limited and ended."""

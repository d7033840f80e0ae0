"""Checks of tables whose types are valid; each yields the problems that it finds."""

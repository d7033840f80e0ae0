"""Artifacts that were compiled before: in the user's folder, and in a cache that machines share."""

LAYOUT = "v5"
"""The folder of this format, below the root of a cache and below the URL of a shared one."""

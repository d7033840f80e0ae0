"""Artifacts of earlier builds: in the user's folder, and in a cache that machines share."""

LAYOUT = "v5"
"""The folder of this format, below the root of a user's cache and the URL of a shared one."""

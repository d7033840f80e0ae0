"""Artifacts of earlier builds: in the user's folder, and in a cache that machines share."""

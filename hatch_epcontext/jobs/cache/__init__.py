"""Artifacts of earlier builds: in the user's folder, and in a cache that machines share."""

from hatch_epcontext.config.location import LAYOUT as LAYOUT

"""The nodes of a graph that an EP does not compile, and why."""

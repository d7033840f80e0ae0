"""What an EP does not compile of a graph, and why."""

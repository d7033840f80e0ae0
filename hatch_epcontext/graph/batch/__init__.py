"""The batch of a graph: followed (`follow`) by a rule for each operator (`rules`), with its `sizes`."""

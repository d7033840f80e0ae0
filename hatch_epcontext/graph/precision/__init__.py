"""The numbers with which a model computes."""

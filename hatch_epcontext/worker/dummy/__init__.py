"""Dummy inputs: the values that a model accepts, and samples of them."""

"""Dummy inputs: what values a model takes, and samples of them."""

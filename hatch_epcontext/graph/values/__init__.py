"""The values that the inputs of a model accept, as far as its graph shows them."""

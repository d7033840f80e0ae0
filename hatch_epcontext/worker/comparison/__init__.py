"""The source model on the CPU, and how near the outputs of others are to it."""

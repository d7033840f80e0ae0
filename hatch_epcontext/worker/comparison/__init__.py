"""The source model on the CPU, and how near the outputs of what was made of it are."""

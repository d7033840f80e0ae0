"""The source model on the CPU, and how near the outputs of other forms are to it."""

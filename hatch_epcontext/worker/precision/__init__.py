"""The numbers with which a model computes: quantization, and undoing it."""

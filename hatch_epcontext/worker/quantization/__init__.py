"""Quantizing models, and the inputs to calibrate them with."""

"""Reads a handwritten digit from an image."""

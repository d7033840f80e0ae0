"""Quantizing models, with inputs for calibration."""

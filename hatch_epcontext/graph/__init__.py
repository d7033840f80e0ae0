"""ONNX graphs in, ONNX graphs out: their contents, the values that they accept, and others that
compute the same.

What returns no new model changes the one that it gets.
"""

"""ONNX graphs in, ONNX graphs out: their contents, the values that they accept, and other forms of them."""

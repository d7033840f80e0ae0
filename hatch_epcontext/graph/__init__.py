"""ONNX graphs in, ONNX graphs out: what is in them, what they can take, and other forms of them."""

"""The only part of the package that imports onnxruntime and onnx; it runs in processes of its own."""

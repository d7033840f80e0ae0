"""Workers: processes of their own, and the only part of the package that imports onnxruntime and onnx.

The module named after a request's action has the function ``handle`` that answers it.
"""

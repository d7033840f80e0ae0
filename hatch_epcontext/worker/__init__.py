"""Workers: processes of their own, and the only part of the package that imports onnxruntime.

Of this folder, others import only `requests` and `facts`.
"""

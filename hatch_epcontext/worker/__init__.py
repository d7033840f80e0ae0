"""Workers: processes of their own, and the only part of the package that imports onnxruntime.

Other parts import only `requests`, `results`, `advice` and `protocol` from here.
"""

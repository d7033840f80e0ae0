"""A Hatch build hook that ships ONNX models as compiled and validated EP-context artifacts."""

__version__ = "0.1.0"

"""The wheel of this checkout, and front ends that find it."""

from tests.integration.conftest import env, wheelhouse

__all__ = ["env", "wheelhouse"]

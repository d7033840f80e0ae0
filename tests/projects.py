"""A small project whose wheel has one package, for tests that configure and build it."""

from __future__ import annotations

PROJECT = """
[build-system]
requires = ["hatchling", "hatch-epcontext"]
build-backend = "hatchling.build"

[project]
name = "my-app"
version = "1.0"
requires-python = ">=3.10"

[tool.hatch.build.targets.wheel.hooks.epcontext]

[tool.epcontext]
"""

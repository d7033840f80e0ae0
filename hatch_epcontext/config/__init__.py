"""``[tool.epcontext]`` and the environment -> `Config`, with every problem at once."""

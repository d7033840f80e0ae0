"""The cores of commands, and of `api`, beyond building a project's models: one module for each."""

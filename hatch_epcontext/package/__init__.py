"""Artifacts -> the package that an app imports, in a wheel or in an editable install."""

"""What comes from other machines: models, and the packages that an index has."""

"""What commands do beyond building a project's models: one module for each command, and for `api`."""

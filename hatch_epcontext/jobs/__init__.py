"""`Config` -> artifacts: plan, fingerprint, jobs, and the report of what happened."""

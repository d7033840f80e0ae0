"""`Config` -> artifacts: plan, fingerprint, cache, jobs, and the report of what happened."""

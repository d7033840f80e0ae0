"""What can be wrong with a table although its types are right; each check yields what it finds."""

from __future__ import annotations

from hatch_epcontext.checks.common import SOURCE, as_name, check_name, check_twins
from hatch_epcontext.checks.model import check_groups, check_model, check_narrowing, fitting
from hatch_epcontext.checks.root import check_hook, check_root, size_in_bytes
from hatch_epcontext.checks.target import check_target

__all__ = [
    "SOURCE",
    "as_name",
    "check_groups",
    "check_hook",
    "check_model",
    "check_name",
    "check_narrowing",
    "check_root",
    "check_target",
    "check_twins",
    "fitting",
    "size_in_bytes",
]

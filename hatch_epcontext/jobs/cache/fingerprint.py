"""What identifies a job's result: contents, settings and versions; no paths, no times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.jobs.plan import Job, model_spec_for

FORMAT = 9
"""Raised when workers compile or validate the same request in another way."""


def fingerprint(
    job: Job, sha256: Mapping[str, str], versions: Mapping[str, str], calibration: str = ""
) -> str:
    """The hex sha256 that identifies the result of ``job``.

    ``sha256``: of each model's contents, by its name; ``versions``: of ONNX Runtime and the EP's
    package; ``calibration``: what identifies the inputs for which models are quantized. Without versions
    it identifies the settings: what they compile with any versions.
    """
    return value_sha256(
        {
            "format": FORMAT,
            "models": [
                (sha256[model.name], _model_settings(model, job.target)) for model in job.models
            ],
            "target": dataclasses.asdict(job.target.settings),
            "calibration": calibration,
            "versions": versions,
        }
    )


_NOT_COMPILED = frozenset({"path", "key", "listed", "inputs", "states"})
"""Fields of a model that do not change what is compiled. All others count, also future ones."""


def _model_settings(model: Model, target: Target) -> dict[str, Any]:
    spec = dataclasses.asdict(model_spec_for(model, target))
    settings = {name: value for name, value in spec.items() if name not in _NOT_COMPILED}
    # Without a comparison, preparation may accept the result of another simplifier.
    return {**settings, "compared": model.validate.tolerance is not None}


def value_sha256(value: Any) -> str:
    """The hex sha256 of plain values; the order of keys does not count."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

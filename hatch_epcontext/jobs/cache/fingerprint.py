"""What identifies a job's result: contents, settings and versions; no paths, no times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hatch_epcontext.config.settings import Model
from hatch_epcontext.jobs.plan import Job

FORMAT = 13
"""Increased when workers compile or validate the same request differently."""


def fingerprint(
    job: Job, sha256: Mapping[str, str], versions: Mapping[str, str], calibration: str = ""
) -> str:
    """The hex sha256 that identifies the result of ``job``.

    ``sha256``: of each model's contents, by its name; ``versions``: of ONNX Runtime and the EP's
    package; ``calibration``: identifies the inputs for which models are quantized. Without versions it
    identifies the settings: what they compile to, with any versions.
    """
    return value_sha256(
        {
            "format": FORMAT,
            "models": [
                # Without a comparison, preparation may accept the result of another simplifier.
                (
                    sha256[model.name],
                    model_settings(model.on(job.target)),
                    model.is_compared,
                )
                for model in job.models
            ],
            "target": dataclasses.asdict(job.target.settings),
            "calibration": calibration,
            "versions": versions,
        }
    )


_NOT_COMPILED = frozenset(
    {
        *("path", "key", "listed", "validate", "targets", "share_weights"),
        *("shape_set", "fallback", "cut", "license", "download", "origin"),
    }
)
"""Fields of a model that do not change what is compiled. All others count, including future ones."""


def model_settings(model: Model) -> dict[str, Any]:
    """What the configuration fixes in ``model``."""
    return {name: value for name, value in vars(model).items() if name not in _NOT_COMPILED}


def value_sha256(value: Any) -> str:
    """The hex sha256 of plain values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

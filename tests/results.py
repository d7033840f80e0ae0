"""The result of a build, without a build, for tests that need one."""

from __future__ import annotations

from pathlib import Path

from hatch_epcontext.build.artifact import (
    Artifact,
    Built,
    Result,
    Source,
    Validation,
    ValidationStatus,
)
from hatch_epcontext.build.plan import plan
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.settings import Config
from hatch_epcontext.ipc.protocol import ModelFacts

TOML = 'provider = "cpu"\nmodels = ["models/a.onnx"]\n'


def configured(root: Path, toml: str = TOML) -> Config:
    return load(root, parse(toml), {}, {})


def resulting(config: Config, artifact: Artifact) -> Result:
    """The result in which the artifact of every job is ``artifact``."""
    facts = artifact.record.contexts[0]
    sources = tuple(
        Source(model, ModelFacts(facts.inputs, facts.outputs, ()), "00" * 32)
        for model in config.models
    )
    jobs = plan(config).jobs
    validations = {"a": Validation(ValidationStatus.STRUCTURE)}
    built = tuple(Built(job, artifact, validations, False) for job in jobs)
    return Result(sources, built)

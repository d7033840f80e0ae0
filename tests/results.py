"""A build's result as the later rooms get it, without a build."""

from __future__ import annotations

from pathlib import Path

from hatch_epcontext.artifact import Artifact, Proof
from hatch_epcontext.config import Config, load
from hatch_epcontext.plan import plan
from hatch_epcontext.protocol import ModelFacts
from hatch_epcontext.pyproject import parse
from hatch_epcontext.result import Built, Result, Source

TOML = 'provider = "cpu"\nmodels = ["models/a.onnx"]\n'


def configured(root: Path, toml: str = TOML) -> Config:
    return load(root, parse(toml), {}, {})


def resulting(config: Config, artifact: Artifact) -> Result:
    """The result in which every job gave ``artifact``."""
    facts = artifact.record.contexts[0]
    sources = tuple(
        Source(model, ModelFacts(facts.inputs, facts.outputs, ()), "00" * 32)
        for model in config.models
    )
    jobs = plan(config).jobs
    built = tuple(Built(job, artifact, {"a": Proof("structure")}, False) for job in jobs)
    return Result(sources, built)

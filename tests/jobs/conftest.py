from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import build
from tests.models import network, save

Run = Callable[..., Result]


@pytest.fixture
def log() -> list[str]:
    """The lines that the build logs."""
    return []


@pytest.fixture
def run(project: Path, tmp_path: Path, log: list[str]) -> Run:
    """Build the project with a configuration; all builds share one cache."""
    save(network(), project / "models" / "a.onnx")

    def built(
        toml: str, environ: Mapping[str, str] | None = None, workers: Workers | None = None
    ) -> Result:
        staging = Path(tempfile.mkdtemp(prefix="staging-", dir=tmp_path))
        planned = plan(load(project, parse(toml), {}, environ or {}))
        return build(planned, staging, Cache(tmp_path / "cache", log.append), log.append, workers)

    return built

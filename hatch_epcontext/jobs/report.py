"""The report of a build: its data, and a line for each job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import hatch_epcontext
from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import (
    GENERATOR,
    Built,
    FailureReport,
    Preparation,
    Result,
    Source,
    Times,
)
from hatch_epcontext.jobs.validation import describe_validation
from hatch_epcontext.text import count
from hatch_epcontext.worker.results import Context, Coverage, Validation, ValidationStatus


@dataclass(frozen=True)
class ModelReport:
    """One model of a job.

    ``source_size``: bytes of the source and its external data.
    ``chip``: what it was compiled for, in words.
    """

    model: str
    source_sha256: str
    source_size: int
    preparation: Preparation
    coverage: Coverage | None
    validation: Validation
    chip: str


@dataclass(frozen=True)
class JobReport:
    """One job.

    ``size``: bytes of all its ``files``.
    ``times``: those of the build that compiled it.
    """

    target: str
    provider: str
    cached: bool
    models: tuple[ModelReport, ...]
    times: Times
    size: int
    group: str | None
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    @property
    def load(self) -> float | None:
        """Seconds to open sessions on all its models; None if one was not opened."""
        loads = [m.validation.load for m in self.models if m.validation.load is not None]
        return sum(loads) if len(loads) == len(self.models) else None


@dataclass(frozen=True)
class Report:
    """All jobs of a build."""

    generator: str
    jobs: tuple[JobReport, ...]
    failures: tuple[FailureReport, ...] = ()


def make_report(result: Result) -> Report:
    """The report of a build: the manifest's facts, and times and failures, which a manifest must not have."""
    by_name = {source.model.name: source for source in result.sources}
    return Report(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        tuple(_report(built, by_name) for built in result.built),
        result.failures,
    )


def _report(built: Built, sources: Mapping[str, Source]) -> JobReport:
    record = built.artifact.record
    models = zip(built.job.models, record.preparations, record.contexts, strict=True)
    return JobReport(
        target=built.job.target.name,
        provider=built.job.target.provider.name,
        cached=built.cached,
        models=tuple(
            ModelReport(
                model.name,
                sources[model.name].sha256,
                sources[model.name].size,
                preparation,
                context.coverage,
                built.validations[model.name],
                _chip(built, context),
            )
            for model, preparation, context in models
        ),
        times=record.times,
        size=built.artifact.size,
        group=built.job.group,
        files=record.files,
        versions=record.versions,
    )


def _chip(built: Built, context: Context) -> str:
    provider = built.job.target.provider
    return provider.describe(provider.compiled_for(context.compatibility))


def describe_coverage(coverage: Coverage | None) -> str:
    """The coverage for a summary; an optimized graph has none."""
    if coverage is None:
        return "optimized graph"
    contexts = f" in {coverage.partitions} contexts" if coverage.partitions > 1 else ""
    return f"{coverage.compiled}/{coverage.nodes} nodes{contexts}"


def summarize(built: Built, seconds: float) -> str:
    """A job that took ``seconds``, in one line with what a user must know; the report has the rest."""
    record, validations = built.artifact.record, built.validations.values()
    is_ok = all(
        v.status is ValidationStatus.RAN and v.compared and not v.sensitive for v in validations
    )
    parts = ["ok" if is_ok else "compiled"]
    for preparation, context in zip(record.preparations, record.contexts, strict=True):
        name = f"{context.model} " if built.job.group else ""
        validation = describe_validation(built.validations[context.model])
        parts.append(name + ", ".join([*_summarize_model(preparation, context), validation]))
    parts.append("from the cache" if built.cached else f"{seconds:.1f} s")
    return f"{built.job.location} ({built.job.target.provider.name}): {', '.join(parts)}"


def _summarize_model(preparation: Preparation, context: Context) -> Iterator[str]:
    yield describe_coverage(context.coverage)
    if preparation.precision:
        yield preparation.precision
    if preparation.rewrites:
        yield count(len(preparation.rewrites), "rewrite")
    if preparation.options:
        yield f"with {', '.join(preparation.options)}"

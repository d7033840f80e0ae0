"""What a build came to: in one line for each job, and in full as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import hatch_epcontext
from hatch_epcontext.artifact import GENERATOR, FileRecord, Preparation, Proof, Times
from hatch_epcontext.errors import Problem
from hatch_epcontext.protocol import Context, Coverage
from hatch_epcontext.result import Built, Failure, Result, Source
from hatch_epcontext.structure import show_size

MOST_WORDS = 90
"""Characters of a failed preparation's message that a line has room for; the report has all."""


@dataclass(frozen=True)
class ModelReport:
    """One model of a job. ``source_size``: bytes of the source and its external data."""

    model: str
    source_sha256: str
    source_size: int
    preparation: Preparation
    coverage: Coverage | None
    validation: Proof


@dataclass(frozen=True)
class JobReport:
    """One job. ``size``: bytes of all its ``files``, and ``saved`` those that sharing weights saved;
    times are of the build that compiled it.
    """

    target: str
    provider: str
    cached: bool
    models: tuple[ModelReport, ...]
    times: Times
    speedup: float | None
    size: int
    group: str | None
    saved: int
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class FailureReport:
    """A job that failed: its ``models`` by name, and what is wrong with it."""

    target: str
    provider: str
    models: tuple[str, ...]
    group: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Report:
    """All jobs of a build."""

    generator: str
    jobs: tuple[JobReport, ...]
    failures: tuple[FailureReport, ...] = ()


def make(result: Result) -> Report:
    """The report of a build: what the manifest says, and what it must not say, times and failures."""
    by_name = {source.model.name: source for source in result.sources}
    return Report(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        tuple(_job(done, by_name) for done in result.built),
        tuple(map(_failure, result.failures)),
    )


def _failure(failure: Failure) -> FailureReport:
    job = failure.job
    names = tuple(model.name for model in job.models)
    return FailureReport(
        job.target.name, job.target.provider.name, names, job.group, failure.problems
    )


def _job(built: Built, sources: Mapping[str, Source]) -> JobReport:
    record = built.artifact.record
    times = record.times
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
                built.proofs[model.name],
            )
            for model, preparation, context in models
        ),
        times=times,
        speedup=times.load_source / times.load_context
        if times.load_source and times.load_context
        else None,
        size=built.artifact.size,
        group=built.job.group,
        saved=built.saved,
        files=record.files,
        versions=record.versions,
    )


def describe(built: Built) -> str:
    """A finished job in one line."""
    record = built.artifact.record
    parts = [f"{built.job.where} ({built.job.target.provider.name})"]
    for preparation, context in zip(record.preparations, record.contexts, strict=True):
        told = list(_described(built, preparation, context))
        name = f"{context.model} " if built.job.group else ""
        parts.append(name + ", ".join(told))
    parts.append(show_size(built.artifact.size))
    if built.job.group:
        parts.append(f"{show_size(built.saved)} saved by sharing")
    parts.append("from the cache" if built.cached else f"compiled in {record.times.compile:.1f} s")
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _described(built: Built, preparation: Preparation, context: Context) -> Iterator[str]:
    if preparation.failed:
        failed = "; ".join(_short(failure) for failure in preparation.failed)
        yield f"prepared with {preparation.folding} ({failed})"
    if (coverage := context.coverage) is None:
        yield "optimized graph"
    else:
        contexts = "context" if coverage.partitions == 1 else "contexts"
        yield f"{coverage.compiled}/{coverage.nodes} nodes in {coverage.partitions} {contexts}"
    if made_for := built.job.target.provider.compiled_for(context.compatibility):
        yield "for " + ", ".join(f"{name} {value}" for name, value in made_for.items())
    yield proven(built.proofs[context.model])


def _short(text: str) -> str:
    return textwrap.shorten(text.rstrip("."), MOST_WORDS, placeholder=" ...")


def proven(proof: Proof) -> str:
    """What a proof says, in words."""
    if proof.how == "none":
        return "NOT validated (validate = false)"
    if proof.how == "structure":
        return f"structure checked, NOT run{f' ({proof.why})' if proof.why else ''}"
    ran = {
        "cpu": f"ran on the CPU only ({proof.why})",
        "alone": f"structure checked ({proof.why}); compiled alone it ran",
    }.get(proof.how, "ran")
    if not proof.agreements:
        return f"{ran}, outputs finite, not compared"
    furthest = max(agreement.max_abs for agreement in proof.agreements)
    cosine = f"cosine {proof.cosine:.5f}, " if proof.cosine is not None else ""
    return f"{ran} and agrees with the CPU ({cosine}at most {furthest:.2g} apart)"

"""Runs a plan: cache, workers, validation, progress."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from hatch_epcontext.artifact import Artifact, Proof, Record, link_or_copy, record_files
from hatch_epcontext.cache import Cache
from hatch_epcontext.config import Model
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.fingerprint import file_sha256, fingerprint, model_sha256
from hatch_epcontext.plan import (
    Job,
    Plan,
    check_environment,
    distributions,
    model_spec,
    target_spec,
)
from hatch_epcontext.process import call
from hatch_epcontext.protocol import (
    CompileReply,
    CompileRequest,
    Context,
    InspectReply,
    InspectRequest,
    ModelFacts,
    ValidateReply,
    ValidateRequest,
)

MOST_NODES = 10
"""How many of the nodes left to the CPU a message names."""


@dataclass(frozen=True)
class Source:
    """A source model as this build found it."""

    model: Model
    facts: ModelFacts
    sha256: str


@dataclass(frozen=True)
class Built:
    """A job that is done: its artifact, and the proof of each of its models."""

    job: Job
    artifact: Artifact
    proofs: Mapping[str, Proof]
    cached: bool


@dataclass(frozen=True)
class Result:
    """What a plan came to, models and jobs in the plan's order."""

    sources: tuple[Source, ...]
    built: tuple[Built, ...]


def inspect(plan: Plan, staging: Path) -> tuple[Source, ...]:
    """All models of the plan as their files are; raises BuildError with all that is wrong with them."""
    models = plan.config.models
    static = {
        model.name: target.provider.ep
        for model in models
        for target in model.targets
        if target.provider.static_shapes
    }
    request = InspectRequest(tuple(map(model_spec, models)), static)
    reply: InspectReply = call(
        request, staging / "inspect", where="reading the models", timeout=plan.config.timeout
    )
    return tuple(
        Source(model, facts, model_sha256(model.path, facts.external_data))
        for model, facts in zip(models, reply.models, strict=True)
    )


def build(plan: Plan, staging: Path, cache: Cache, report: Callable[[str], None]) -> Result:
    """Compile and prove every job of the plan, those that the cache has excepted.

    ``staging`` is a folder of this build's own; ``report`` is told one line for each finished job.
    Raises RequirementError when the environment lacks something, and BuildError with all the jobs
    that failed, once every other one is done and kept.
    """
    versions = check_environment(plan.config.targets, plan.requirements)
    sources = inspect(plan, staging)
    builder = _Builder(
        {source.model.name: source for source in sources},
        versions,
        cache,
        staging,
        plan.config.timeout,
    )
    built, problems = [], list[Problem]()
    with ThreadPoolExecutor(plan.config.jobs) as pool:
        try:
            for future in [pool.submit(builder.build, job) for job in plan.jobs]:
                try:
                    done = future.result()
                except BuildError as error:
                    problems += error.problems
                else:
                    built.append(done)
                    report(describe(done))
        finally:
            # An interrupted build is not to start what is still waiting.
            pool.shutdown(cancel_futures=True)
    if problems:
        raise BuildError(*problems)
    return Result(sources, tuple(built))


@dataclass(frozen=True)
class _Builder:
    sources: Mapping[str, Source]
    versions: Mapping[str, str]
    cache: Cache
    staging: Path
    timeout: float

    def build(self, job: Job) -> Built:
        scratch = self.staging / "jobs" / job.folder
        scratch.mkdir(parents=True)
        key = self._fingerprint(job)
        artifact = self.cache.get(key)
        cached = artifact is not None
        if artifact is None:
            artifact = self._compile(job, key, scratch)
        for context in artifact.record.contexts:
            _check_coverage(job, context)
        proofs = {
            context.model: self._prove(job, model, artifact, context, scratch)
            for model, context in zip(job.models, artifact.record.contexts, strict=True)
        }
        return Built(job, artifact, proofs, cached)

    def _fingerprint(self, job: Job) -> str:
        spec = target_spec(job.target)
        models = [
            (
                self.sources[model.name].sha256,
                {
                    "name": model.name,
                    "dims": model.dims,
                    "shapes": model.shapes,
                    "constants": model.constants,
                },
            )
            for model in job.models
        ]
        target = {
            "provider": spec.provider,
            "provider_options": spec.provider_options,
            "session_options": spec.session_options,
            "optimization": spec.optimization,
            "embed": spec.embed,
        }
        return fingerprint(models, target, self._versions(job))

    def _versions(self, job: Job) -> dict[str, str]:
        relevant = distributions(job.target)
        return {name: v for name, v in self.versions.items() if name in relevant}

    def _compile(self, job: Job, key: str, scratch: Path) -> Artifact:
        made, prepared = scratch / "artifact", scratch / "prepared"
        made.mkdir()
        prepared.mkdir()
        request = CompileRequest(
            tuple(map(model_spec, job.models)), target_spec(job.target), str(made), str(prepared)
        )
        reply: CompileReply = call(
            request, scratch / "compile", where=job.where, timeout=self.timeout
        )
        record = Record(
            reply.product, reply.contexts, record_files(made), self._versions(job), reply.seconds
        )
        artifact = self.cache.store(key, made, record)
        shutil.rmtree(prepared)
        return artifact

    def _prove(
        self, job: Job, model: Model, artifact: Artifact, context: Context, scratch: Path
    ) -> Proof:
        how = _how(job, model)
        if how != "run":
            return Proof(how)
        tolerance = model.tolerance_for(job.target.provider)
        key = json.dumps(
            {
                "model": model.name,
                "inputs": _inputs_digest(model.inputs),
                "tolerance": asdict(tolerance) if tolerance else None,
                "load_options": job.target.load_options,
            },
            sort_keys=True,
        )
        if proof := self.cache.proof(artifact, key):
            return proof
        moved = scratch / f"moved-{model.name}"
        shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        request = ValidateRequest(
            model_spec(model),
            target_spec(job.target),
            artifact.record.product,
            context,
            str(moved),
            model.inputs,
            tolerance,
        )
        reply: ValidateReply = call(
            request,
            scratch / f"validate-{model.name}",
            where=f"{job.where}: validation",
            timeout=self.timeout,
        )
        shutil.rmtree(moved)
        proof = Proof("run", reply.agreements)
        self.cache.keep_proof(artifact, key, proof)
        return proof


def _how(job: Job, model: Model) -> str:
    if model.validate is False:
        return "none"
    if model.validate == "structure":
        return "structure"
    if job.target.provider.runs_on(sys.platform, platform.machine()):
        return "run"
    if model.validate == "require":
        raise BuildError(
            Problem(
                f"{job.where}: validation",
                f"{job.target.provider.ep} cannot run its contexts on this machine "
                f'({sys.platform}, {platform.machine()}), and validate is "require".',
                f'Build elsewhere, or take "auto" in {model.key}.validate: it checks the structure.',
            )
        )
    return "structure"


def _inputs_digest(inputs: str) -> str:
    path = Path(inputs)
    if path.is_file():
        return file_sha256(path)
    if path.is_dir():
        return hashlib.sha256(
            json.dumps({n: f.sha256 for n, f in record_files(path).items()}).encode()
        ).hexdigest()
    return inputs


def _check_coverage(job: Job, context: Context) -> None:
    coverage = context.coverage
    if coverage is None or coverage.share >= job.target.min_coverage:
        return
    named = [f"{node.op} {node.name}".rstrip() for node in coverage.left[:MOST_NODES]]
    more = len(coverage.left) - len(named)
    raise BuildError(
        Problem(
            job.where,
            f"{job.target.provider.ep} compiled {coverage.compiled} of {coverage.nodes} nodes "
            f"({coverage.share:.1%}), and min-coverage is {job.target.min_coverage:.1%}. "
            f"Left to the CPU: {', '.join(named)}{f' and {more} more' if more else ''}.",
            "Change what the EP cannot take, or lower min-coverage.",
        )
    )


def describe(built: Built) -> str:
    """A finished job in one line."""
    record = built.artifact.record
    parts = [f"{built.job.where} ({built.job.target.provider.name})"]
    for context in record.contexts:
        if (coverage := context.coverage) is None:
            parts.append("optimized graph")
        else:
            contexts = "context" if coverage.partitions == 1 else "contexts"
            parts.append(
                f"{coverage.compiled}/{coverage.nodes} nodes in {coverage.partitions} {contexts}"
            )
        parts.append(_told(built.proofs[context.model]))
    parts.append(_size(built.artifact.size))
    parts.append("from the cache" if built.cached else f"compiled in {record.seconds:.1f} s")
    return f"{parts[0]}: {', '.join(parts[1:])}"


def _told(proof: Proof) -> str:
    if proof.how == "none":
        return "NOT validated (validate = false)"
    if proof.how == "structure":
        return "structure checked, NOT run"
    if proof.cosine is None:
        return "ran, outputs finite, not compared"
    furthest = max(agreement.max_abs for agreement in proof.agreements)
    return f"ran and agrees with the CPU (cosine {proof.cosine:.5f}, at most {furthest:.2g} apart)"


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"

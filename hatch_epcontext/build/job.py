"""One job from its fingerprint to its validation: cache, preparation, compiling, measuring."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hatch_epcontext.build.artifact import (
    Artifact,
    Built,
    Preparation,
    Record,
    Source,
    Times,
    Validation,
    ValidationStatus,
)
from hatch_epcontext.build.cache import Cache
from hatch_epcontext.build.coverage import check_coverage
from hatch_epcontext.build.fingerprint import fingerprint
from hatch_epcontext.build.plan import Job, model_spec_for, model_spec_to_run, target_spec
from hatch_epcontext.build.preparation import prepare
from hatch_epcontext.build.requirements import versions_of
from hatch_epcontext.build.validation import (
    not_run_error,
    reason_not_to_open,
    reason_not_to_run,
    validation_from_reply,
    validation_key,
    validation_of_alone,
    validation_without_run,
)
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import link_or_copy, record_files
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.ipc.protocol import (
    PROTOBUF_LIMIT,
    CompileReply,
    CompileRequest,
    Context,
    MeasureRequest,
    ValidateRequest,
)


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of one build; ``versions`` are of all that is installed for it."""

    sources: Mapping[str, Source]
    versions: Mapping[str, str]
    cache: Cache
    staging: Path
    workers: Workers

    def run(self, job: Job) -> Built:
        """Take the job's artifact from the cache or compile it, and validate it.

        Raises BuildError with the job's problems.
        """
        scratch = self.staging / "jobs" / job.folder
        scratch.mkdir(parents=True)
        settings_key = self._fingerprint(job, {})
        if job.target.from_cache:
            artifact, cached = self._latest(job, settings_key), True
        else:
            key = self._key(job)
            found = self.cache.get(key)
            artifact, cached = found or self._compile(job, key, scratch), found is not None
            self.cache.set_latest(settings_key, key)
        for context in artifact.record.contexts:
            check_coverage(context.coverage, job.target, job.location)
        alone = [self.run(each) for each in job.alone]
        validations = {
            context.model: validation_of_alone(
                job,
                model,
                [each.validations[model.name] for each in alone if model.name in each.validations],
            )
            if job.needs_device
            else self._validate(job, model, artifact, context, scratch)
            for model, context in zip(job.models, artifact.record.contexts, strict=True)
        }
        saved = sum(built.artifact.size for built in alone) - artifact.size if alone else 0
        return Built(job, artifact, validations, cached, saved)

    def dry_run(self, job: Job) -> tuple[str, bool]:
        """The job's fingerprint, and whether the cache has its artifact; nothing is compiled."""
        if job.target.from_cache:
            settings_key = self._fingerprint(job, {})
            return settings_key, self.cache.latest(settings_key) is not None
        key = self._key(job)
        return key, self.cache.get(key) is not None

    def _latest(self, job: Job, settings_key: str) -> Artifact:
        artifact = self.cache.latest(settings_key)
        if artifact is None:
            raise BuildError(
                Problem(
                    Kind.NOT_CACHED,
                    job.location,
                    "HATCH_EPCONTEXT_FROM_CACHE names its target, and the cache has no artifact of "
                    "this model with these settings.",
                    _build_elsewhere(job),
                )
            )
        return artifact

    def _key(self, job: Job) -> str:
        return self._fingerprint(job, versions_of(job.target, self.versions))

    def _fingerprint(self, job: Job, versions: Mapping[str, str]) -> str:
        sha256 = {name: source.sha256 for name, source in self.sources.items()}
        return fingerprint(job, sha256, versions)

    def _compile(self, job: Job, key: str, scratch: Path) -> Artifact:
        self._check_embeddable(job)
        start = time.monotonic()
        prepared = [prepare(job, model, scratch, self.workers) for model in job.models]
        prepare_seconds = time.monotonic() - start
        folder = scratch / "artifact"
        folder.mkdir()
        request = CompileRequest(
            models=tuple(model_spec_for(model, job.target) for model in job.models),
            prepared=tuple(each.path for each in prepared),
            target=target_spec(job.target),
            folder=str(folder),
        )
        try:
            reply = self.workers.call(request, scratch / "compile", location=job.location)
        except BuildError as error:
            raise _with_preparations(error, [each.preparation for each in prepared]) from None
        # Hashed before any other process opens them.
        files = record_files(folder)
        times = Times(prepare_seconds, reply.seconds)
        record = Record(
            reply.product,
            tuple(each.preparation for each in prepared),
            reply.contexts,
            files,
            versions_of(job.target, self.versions),
            self._measure(job, request, reply, times, scratch),
        )
        artifact = self.cache.store(key, folder, record)
        # Copies of whole models, of which a build may have many.
        for copy in scratch.glob("prepared-*"):
            shutil.rmtree(copy)
        return artifact

    def _check_embeddable(self, job: Job) -> None:
        for model in job.models if job.target.settings.embed else ():
            if (size := self.sources[model.name].size) > PROTOBUF_LIMIT:
                raise BuildError(
                    Problem(
                        Kind.TOO_LARGE,
                        job.location,
                        "embed = true puts the compiled blob into an ONNX file, which cannot be larger "
                        f"than 2 GiB, and the model has {size / 2**30:.1f} GiB.",
                        "Remove embed: the blob is then a file beside the context model.",
                    )
                )

    def _measure(
        self, job: Job, compiled: CompileRequest, reply: CompileReply, times: Times, scratch: Path
    ) -> Times:
        """``times`` with the times to load, for jobs of one model and chip that this machine can run."""
        shared = "its models share weights" if job.group else None
        if reason := reason_not_to_run(job) or reason_not_to_open(job) or shared:
            return replace(times, not_measured=reason)
        request = MeasureRequest(
            compiled.prepared[0], compiled.target, reply.product, reply.contexts[0], compiled.folder
        )
        try:
            measured = self.workers.call(request, scratch / "measure", location=job.location)
        except BuildError as error:
            return replace(times, not_measured="; ".join(p.message for p in error.problems))
        return replace(times, load_source=measured.load_source, load_context=measured.load_context)

    def _validate(
        self, job: Job, model: Model, artifact: Artifact, context: Context, scratch: Path
    ) -> Validation:
        not_run = validation_without_run(job, model)
        if not_run and not job.target.from_cache:
            return not_run
        key = validation_key(job, model)
        cached = self.cache.validation(artifact, key)
        # A machine without the EP's device then may have one now.
        if cached and (cached.status is ValidationStatus.RAN or job.target.from_cache):
            return cached
        if not_run:
            return not_run
        if job.target.from_cache:
            raise BuildError(
                Problem(
                    Kind.NOT_CACHED,
                    f"{job.location}: validation",
                    "HATCH_EPCONTEXT_FROM_CACHE names its target, and the artifact in the cache was "
                    "not validated with these inputs, this tolerance and these options.",
                    _build_elsewhere(job),
                )
            )
        moved = scratch / f"moved-{model.name}"
        shutil.copytree(artifact.folder, moved, copy_function=link_or_copy)
        request = ValidateRequest(
            model_spec_to_run(model, job.target),
            target_spec(job.target),
            artifact.record.product,
            context,
            str(moved),
            model.tolerance_for(job.target.provider),
            artifact.record.contexts if job.group else (),
        )
        reply = self.workers.call(
            request,
            scratch / f"validate-{model.name}",
            location=f"{job.location}: validation",
        )
        shutil.rmtree(moved)
        validation = validation_from_reply(artifact, reply)
        if reply.unavailable is not None and model.validate.mode == "require":
            raise not_run_error(job, model, reply.unavailable)
        self.cache.store_validation(artifact, key, validation)
        return validation


def _build_elsewhere(job: Job) -> str:
    return (
        f"Build it where it can be built: HATCH_EPCONTEXT_TARGETS={job.target.name}, "
        "with the same cache folder."
    )


def _with_preparations(error: BuildError, preparations: list[Preparation]) -> BuildError:
    """``error`` with the failed preparations before it, which may be the cause."""
    failures = "".join(
        f"\nThe model was prepared with {preparation.simplifier}, because of:\n{failure}"
        for preparation in preparations
        for failure in preparation.failed
    )
    return BuildError(
        *(replace(problem, message=problem.message + failures) for problem in error.problems)
    )

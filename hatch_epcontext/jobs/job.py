"""One job from its fingerprint to its validation, with the cache before each step that takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.artifact import Artifact, Built, Source, ValidationRun, ValidationStatus
from hatch_epcontext.jobs.attempts import with_notes
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.entry import Check, check_for
from hatch_epcontext.jobs.cache.fingerprint import fingerprint, value_sha256
from hatch_epcontext.jobs.cache.index import Index, changed_error
from hatch_epcontext.jobs.coverage import check_coverage
from hatch_epcontext.jobs.executors.executor import Executor
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.jobs.validation import (
    check_conclusive,
    input_files,
    inputs_digest,
    not_run_error,
    validation_key,
    validation_of_alone,
    validation_without_run,
)
from hatch_epcontext.worker.facts import Context

_DISAGREEMENTS = frozenset({Kind.OUTPUT_DIFFERS, Kind.NOT_FINITE})
"""What an EP can compute rightly in another form of the model."""


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of one build; ``log`` gets a line when a job waits for another build."""

    sources: Mapping[str, Source]
    cache: Cache
    index: Index
    executor: Executor
    staging: Path
    log: Callable[[str], None]

    def run(self, job: Job) -> Built:
        """Take the job's artifact from the cache or compile it, and validate it.

        Raises BuildError with the job's problems.
        """
        try:
            return self._run(job)
        finally:
            self.executor.finished(job)

    def dry_run(self, job: Job) -> tuple[str, bool]:
        """The job's fingerprint, and whether the cache has its artifact; nothing is compiled."""
        if job.target.from_cache:
            settings_key = self._fingerprint(job, {})
            latest = self.cache.latest(settings_key)
            check = self._check(job)
            return settings_key, latest is not None and self.cache.has(latest, check)
        key = self._key(job)
        return key, self._cache(job).has(key, self._check(job))

    def _run(self, job: Job) -> Built:
        settings_key = self._fingerprint(job, {})
        folder = self.staging / "artifacts" / job.folder
        if job.target.from_cache:
            key, artifact = self._latest(job, settings_key, folder)
            cached = True
        else:
            key = self._key(job)
            artifact, cached = self._artifact(job, key, folder)
            self._cache(job).set_latest(settings_key, key)
        record = artifact.record
        for model, preparation, context in zip(
            job.models, record.preparations, record.contexts, strict=True
        ):
            try:
                check_coverage(context.coverage, job.target, model, job.location)
            except BuildError as error:
                raise with_notes(error, preparation.tried) from None
        alone = [self.run(each) for each in job.alone]
        if job.other_forms and not job.target.from_cache:
            artifact, runs = self._agreeing(job, key, artifact, cached=cached)
        else:
            runs = self._validations(job, key, artifact, alone)
        saved = sum(built.artifact.size for built in alone) - artifact.size if alone else 0
        validations = {name: run.validation for name, run in runs.items()}
        loads = {name: run.load for name, run in runs.items() if run.load is not None}
        return Built(job, artifact, validations, cached, saved, loads)

    def _validations(
        self, job: Job, key: str, artifact: Artifact, alone: Sequence[Built] = ()
    ) -> dict[str, ValidationRun]:
        """The validations of the job's models; ``alone`` are the results of its jobs of that name."""
        return {
            context.model: ValidationRun(
                validation_of_alone(
                    job,
                    model,
                    [
                        each.validations[model.name]
                        for each in alone
                        if model.name in each.validations
                    ],
                )
            )
            if job.needs_device
            else self._validate(job, model, key, artifact, context)
            for model, context in zip(job.models, artifact.record.contexts, strict=True)
        }

    def _agreeing(
        self, job: Job, key: str, artifact: Artifact, *, cached: bool
    ) -> tuple[Artifact, dict[str, ValidationRun]]:
        """The job's artifact and its validations; in another form if it disagrees with the CPU as it is."""
        if cached and not self._is_validated(job, key, artifact):
            # Perhaps because it disagreed in an earlier build.
            for other in job.other_forms:
                if found := self._cached_in_form(job, other, key):
                    return found
        try:
            return artifact, self._validations(job, key, artifact)
        except BuildError as error:
            if not all(problem.kind in _DISAGREEMENTS for problem in error.problems):
                raise
            disagreement = error
        notes: list[str] = []
        for other in job.other_forms:
            try:
                if found := self._in_form(other, key, notes):
                    self._set_latest(job, other, key)
                    return found
            finally:
                self.executor.finished(other)
        raise with_notes(disagreement, tuple(notes))

    def _cached_in_form(
        self, job: Job, other: Job, key: str
    ) -> tuple[Artifact, dict[str, ValidationRun]] | None:
        """The artifact of ``job`` in the form of ``other``, if the cache has it, and it agrees."""
        other_key, folder = _key_in_form(other, key), self.staging / "artifacts" / other.folder
        artifact = self._cache(job).take(other_key, folder, self._check(job))
        if artifact is None:
            return None
        try:
            runs = self._validations(other, other_key, artifact)
        except BuildError:
            return None
        self._set_latest(job, other, key)
        return artifact, runs

    def _in_form(
        self, job: Job, key: str, notes: list[str]
    ) -> tuple[Artifact, dict[str, ValidationRun]] | None:
        """The artifact of ``job``, which is in another form, and its validations; None if it disagrees too.

        ``key`` is the fingerprint of the plain one.
        """
        own_key = _key_in_form(job, key)
        try:
            artifact, _ = self._artifact(job, own_key, self.staging / "artifacts" / job.folder)
        except BuildError as error:
            if any(problem.kind is Kind.INTERRUPTED for problem in error.problems):
                raise
            # Most models have nothing to unroll, and many no convolutions.
            return None
        try:
            return artifact, self._validations(job, own_key, artifact)
        except BuildError as error:
            if any(problem.kind is Kind.INTERRUPTED for problem in error.problems):
                raise
            rewrites = "; ".join(artifact.record.preparations[0].rewrites)
            notes.append(f"{rewrites}: {error.problems[0].message.splitlines()[0]}")
            return None

    def _set_latest(self, job: Job, other: Job, key: str) -> None:
        self._cache(job).set_latest(self._fingerprint(job, {}), _key_in_form(other, key))

    def _is_validated(self, job: Job, key: str, artifact: Artifact) -> bool:
        """Whether the cache has a validation of all models of the job."""
        return all(
            validation_without_run(job, model, self.executor.reason_not_to_run(job))
            or self._cache(job).validation(
                key, validation_key(job, model, artifact.record, self.index)
            )
            for model in job.models
        )

    def _artifact(self, job: Job, key: str, folder: Path) -> tuple[Artifact, bool]:
        """The job's artifact with its files in ``folder``, and whether it is from the cache."""
        cache, check = self._cache(job), self._check(job)
        if artifact := cache.take(key, folder, check):
            return artifact, True
        self._check_embeddable(job)
        with cache.lock(key, self._waiting(job)):
            # Another build may have compiled it in the meantime.
            if artifact := cache.take(key, folder, check):
                return artifact, True
            with self._unchanged(job):
                record = self.executor.compile(job, key, folder)
            cache.store(key, folder, record, check)
            return Artifact(folder, record), False

    @contextlib.contextmanager
    def _unchanged(self, job: Job) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads is not what the build has hashed."""
        names = [model.validate.inputs for model in job.models]
        names += filter(None, [job.target.calibration])
        inputs = [(name, inputs_digest(name, self.index)) for name in names]
        try:
            yield
        except BuildError:
            # Half a file may be the reason.
            self._check_files(job)
            raise
        self._check_files(job)
        for name, digest in inputs:
            if inputs_digest(name, self.index) != digest:
                raise changed_error(Path(name))

    def _check_files(self, job: Job) -> None:
        for file in input_files(job.target.calibration) if job.target.calibration else ():
            self.index.check(file)
        for model in job.models:
            files = self.sources[model.name].files
            for file in (*files, *input_files(model.validate.inputs)):
                self.index.check(file)

    def _waiting(self, job: Job) -> Callable[[], None]:
        beat = Heartbeat()
        line = f"{job.location}: waiting for another build, which compiles the same"
        said: list[str] = []

        def wait() -> None:
            if self.executor.stopped:
                message = "the build was interrupted."
                raise BuildError(Problem(Kind.INTERRUPTED, job.location, message))
            if not said:
                said.append(line)
                self.log(line)
            elif (seconds := beat.due()) is not None:
                self.log(f"{line}, for {seconds:.0f} s")

        return wait

    def _latest(self, job: Job, settings_key: str, folder: Path) -> tuple[str, Artifact]:
        if job.target.has_secrets:
            raise BuildError(
                Problem(
                    Kind.NOT_CACHED,
                    job.location,
                    "HATCH_EPCONTEXT_FROM_CACHE takes its target only from the cache, which keeps nothing "
                    "that was compiled with a secret.",
                    "Compile the target in the build of the wheel.",
                )
            )
        key = self.cache.latest(settings_key)
        artifact = None if key is None else self.cache.take(key, folder, self._check(job))
        if key is None or artifact is None:
            raise BuildError(
                Problem(
                    Kind.NOT_CACHED,
                    job.location,
                    "HATCH_EPCONTEXT_FROM_CACHE takes its target only from the cache, and the cache has no "
                    f"artifact of this model with these settings.{self.cache.trouble}",
                    _build_elsewhere(job),
                )
            )
        return key, artifact

    def _cache(self, job: Job) -> Cache:
        """The cache for ``job``; for one with a secret none, because nothing may say whether that changed:
        its hash could be guessed.
        """
        return Cache(None, self.log) if job.target.has_secrets else self.cache

    def _check(self, job: Job) -> Check:
        """A check of what the cache has for ``job``."""
        # Only from the cache it may have been compiled by any versions.
        versions = {} if job.target.from_cache else self.executor.versions(job)
        return check_for([self.sources[m.name] for m in job.models], job.target, versions)

    def _key(self, job: Job) -> str:
        return self._fingerprint(job, self.executor.versions(job))

    def _fingerprint(self, job: Job, versions: Mapping[str, str]) -> str:
        sha256 = {name: source.sha256 for name, source in self.sources.items()}
        given = job.target.calibration
        calibration = inputs_digest(given, self.index) if given else ""
        return fingerprint(job, sha256, versions, calibration)

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

    def _validate(
        self, job: Job, model: Model, key: str, artifact: Artifact, context: Context
    ) -> ValidationRun:
        not_run = validation_without_run(job, model, self.executor.reason_not_to_run(job))
        if not_run and not job.target.from_cache:
            return ValidationRun(not_run)
        validated = validation_key(job, model, artifact.record, self.index)
        cached = self._cache(job).validation(key, validated)
        # A machine without the EP's device then may have one now.
        if cached and (cached.validation.status is ValidationStatus.RAN or job.target.from_cache):
            check_conclusive(job, model, cached.validation)
            return cached
        if not_run:
            return ValidationRun(not_run)
        if job.target.from_cache:
            raise BuildError(
                Problem(
                    Kind.NOT_CACHED,
                    f"{job.location}: validation",
                    "HATCH_EPCONTEXT_FROM_CACHE takes its target only from the cache, and the artifact in "
                    "the cache was not validated with these inputs, this tolerance and these options."
                    + self.cache.trouble,
                    _build_elsewhere(job),
                )
            )
        with self._unchanged(job):
            run = self.executor.validate(job, model, key, artifact, context)
        unavailable = run.validation.status is not ValidationStatus.RAN
        if unavailable and model.validate.mode == "require":
            raise not_run_error(job, model, run.validation.reason or "it was not run")
        check_conclusive(job, model, run.validation)
        self._cache(job).store_validation(key, validated, run)
        return run


def _key_in_form(job: Job, key: str) -> str:
    """The fingerprint of ``job``, whose fingerprint in the plain form is ``key``."""
    return value_sha256([key, job.form.value])


def _build_elsewhere(job: Job) -> str:
    return (
        f"Build it where it can be built: HATCH_EPCONTEXT_TARGETS={job.target.name}, "
        "with the same cache."
    )

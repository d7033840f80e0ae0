"""One job from its fingerprint to its validation; the cache is read before each slow step.

`recipes` decides what is tried. The cache has of a job, by these keys:

- ``fingerprint`` (models, settings that change what is compiled, versions; no paths): the lock of builds
  that need the same.
- An attempt's key (fingerprint, recipe): its artifact, stored before its validation or if it is the best.
  What the EP refuses is not stored: a later build tries it again.
- The attempt's key and a validation's key (files, inputs, tolerance): a validation in which it agreed, or
  could not be run.
- The choice (fingerprint, required coverage and validation): the key of the attempt that was chosen.
- ``partial`` (fingerprint): the key of the best attempt if none was whole, so that a build that requires
  less finds it without a search.
- The settings' key (fingerprint without versions): the key of the latest artifact, for builds from the cache.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, InterruptedBuildError, Kind, Problem
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.artifact import PACKAGE, Artifact, Built, Recipe, Record, Refused, Source
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.fingerprint import fingerprint, value_sha256
from hatch_epcontext.jobs.cache.index import Index, changed_error
from hatch_epcontext.jobs.coverage import check_coverage
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.jobs.recipes import (
    Assessment,
    Attempt,
    acceptable,
    best,
    chosen,
    refusal,
    try_recipes,
)
from hatch_epcontext.jobs.steps import Steps
from hatch_epcontext.jobs.validation import (
    check_conclusive,
    input_files,
    inputs_digest,
    not_run_error,
    validation_key,
    validation_of_alone,
    validation_settings,
    validation_without_run,
)
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.worker.results import FEW_SAMPLES, Context, Validation, ValidationStatus

Runs = Mapping[str, Validation]
"""The validation of each model of a job, by its name, up to the first one that differs."""


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of one build; ``log`` gets a line when a job waits for another build."""

    sources: Mapping[str, Source]
    cache: Cache
    index: Index
    executor: Steps
    staging: Path
    log: Callable[[str], None]
    _built_alone: dict[str, Sequence[Built] | BuildError] = field(default_factory=dict)

    def run(self, job: Job) -> Built:
        """Get the job's artifact from the cache or compile it, and validate it.

        Raises BuildError with the job's problems.
        """
        try:
            with job.locating():
                return self._run(job)
        finally:
            self.executor.finished(job)

    def dry_run(self, job: Job) -> tuple[str, bool]:
        """The job's fingerprint, and whether the cache has its artifact; nothing is compiled.

        For a job that only reads the cache it is the fingerprint without versions.
        """
        key: str | None
        if job.target.from_cache:
            fingerprint = self._fingerprint(job, {})
            key = self.cache.ref(fingerprint)
        else:
            with job.locating():
                fingerprint = self._fingerprint(job, self.executor.versions(job))
            key = self._cache(job).ref(self._choice(job, fingerprint), own_first=True)
        return fingerprint, key is not None and self._cache(job).has("artifacts", key, Record)

    def keep(
        self, job: Job, record: Record, folder: Path, validations: Mapping[str, Validation]
    ) -> None:
        """Store what another machine compiled for ``job``: ``record``, with the files in ``folder``."""
        fingerprint, form = self._fingerprint(job, record.versions), record.recipe.form_of(job)
        key = value_sha256([fingerprint, to_plain(record.recipe)])
        self.cache.put("artifacts", key, record, folder)
        self.cache.set_ref(self._fingerprint(job, {}), key)
        self.cache.set_ref(self._choice(job, fingerprint), key)
        for model in form.models:
            if validations[model.name].day:
                name = validation_key(form, model, record, self.index)
                self.cache.store_validation(key, name, validations[model.name])

    def _run(self, job: Job) -> Built:
        settings_key = self._fingerprint(job, {})
        if job.target.from_cache:
            folder = self.staging / PACKAGE / job.folder
            key, artifact = self._latest(job, settings_key, folder)
            _check_coverage(job, artifact.record)
            cached, runs = True, self.validations(job, key, artifact)
            if error := _disagreement(runs):
                raise error
        else:
            key, artifact, cached, runs = self._chosen(job)
            self._cache(job).set_ref(settings_key, key)
        return Built(artifact.record.recipe.form_of(job), artifact, runs, cached)

    def _chosen(self, job: Job) -> tuple[str, Artifact, bool, Runs]:
        """The key of the job's artifact, the artifact, whether the cache had it, and its validations.

        The artifact covers enough, and agrees with the CPU if it can be run here. It is that of an earlier
        build, or the result of a search.
        """
        cache = self._cache(job)
        fingerprint = self._fingerprint(job, self.executor.versions(job))
        choice = self._choice(job, fingerprint)
        wrong: dict[str, Runs] = {}
        if found := self._known(job, choice, wrong):
            return found
        self._check_embeddable(job)
        with cache.lock(fingerprint, self._waiting(job)):
            # Another build may have compiled it in the meantime.
            if found := self._known(job, choice, wrong):
                return found
            attempt, artifact, runs = _Search(self, job, fingerprint, cache, wrong).run()
            cache.set_ref(choice, attempt.key)
            return attempt.key, artifact, attempt.cached, runs

    def _known(
        self, job: Job, choice: str, wrong: dict[str, Runs]
    ) -> tuple[str, Artifact, bool, Runs] | None:
        """The choice of an earlier build, if the cache has it, and if it agrees with the CPU here too.

        If it disagrees, ``wrong`` gets its key and the validations, and it is not tried again.
        """
        folder = self.staging / PACKAGE / job.folder
        # A later choice by others is not better: a build with a choice of its own reads no shared cache.
        key = self._cache(job).ref(choice, own_first=True)
        artifact = None if key in wrong else self.take(job, key, folder)
        if key is None or artifact is None:
            return None
        runs = self.validations(job, key, artifact)
        if _disagreement(runs) is None:
            return key, artifact, True, runs
        # The earlier build could not run the artifact.
        wrong[key] = runs
        shutil.rmtree(folder)
        return None

    def compile(self, job: Job, recipe: Recipe, folder: Path) -> Record | Refused:
        """Compile ``job`` with ``recipe`` into ``folder``; raises as `Steps.compile` does."""
        with self._unchanged(job):
            return self.executor.compile(recipe.form_of(job), recipe, folder)

    def _alone(self, job: Job) -> Sequence[Built]:
        """The results of `Job.alone`, built once."""
        key = job.folder
        if key not in self._built_alone:
            try:
                self._built_alone[key] = [self.run(each) for each in job.alone]
            except BuildError as error:
                self._built_alone[key] = error
        built = self._built_alone[key]
        if isinstance(built, BuildError):
            raise built
        return built

    def validations(self, job: Job, key: str, artifact: Artifact) -> Runs:
        """The validations of the job's models: those in the cache, or new ones."""
        runs: dict[str, Validation] = {}
        form = artifact.record.recipe.form_of(job)
        for model, context in zip(job.models, artifact.record.contexts, strict=True):
            if job.needs_device:
                runs[model.name] = self._validation_alone(job, model)
            else:
                runs[model.name] = self._validate(form, model, key, artifact, context)
            if runs[model.name].differs:
                break
        return runs

    def _validation_alone(self, job: Job, model: Model) -> Validation:
        # Where nothing of the target can be run, nothing is compiled alone.
        reason = None if job.target.from_cache else self.executor.reason_not_to_run(job)
        if not_run := validation_without_run(job, model, reason):
            return not_run
        built = (each.validations for each in self._alone(job))
        validations = [each[model.name] for each in built if model.name in each]
        return validation_of_alone(job, model, validations)

    def _choice(self, job: Job, fingerprint: str) -> str:
        """What identifies the choice of an artifact: what is compiled, and what is required of it."""
        return value_sha256(
            [
                fingerprint,
                job.target.min_coverage,
                [
                    [validation_settings(job, model, self.index), str(model.validate.mode)]
                    for model in job.models
                ],
            ]
        )

    @contextlib.contextmanager
    def _unchanged(self, job: Job) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads has changed since the build hashed it."""
        names = [model.validate.inputs for model in job.models]
        names += filter(None, [job.target.calibration])
        inputs = [(name, inputs_digest(name, self.index)) for name in names]
        try:
            yield
        except BuildError:
            # A file that has changed in the meantime may be the cause.
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
        line = f"{job.location}: waiting for another job or build, which compiles the same"
        printed: list[str] = []

        def wait() -> None:
            if self.executor.stopped:
                message = "the build was interrupted."
                raise InterruptedBuildError(Problem(Kind.INTERRUPTED, "", message))
            if not printed:
                printed.append(line)
                self.log(line)
            elif beat.due():
                self.log(f"{line}, for {beat.seconds:.0f} s")

        return wait

    def _latest(self, job: Job, settings_key: str, folder: Path) -> tuple[str, Artifact]:
        if job.target.has_secrets:
            message = (
                "HATCH_EPCONTEXT_FROM_CACHE allows this target only from the cache, which stores nothing "
                "that was compiled with a secret."
            )
            hint = "Compile the target in the build of the wheel."
            raise BuildError(Problem(Kind.NOT_CACHED, "", message, hint))
        key = self.cache.ref(settings_key)
        artifact = self.take(job, key, folder)
        if key is None or artifact is None:
            message = (
                "HATCH_EPCONTEXT_FROM_CACHE allows this target only from the cache, and the cache has no "
                f"artifact of this model with these settings.{self.cache.trouble}"
            )
            raise BuildError(Problem(Kind.NOT_CACHED, "", message, _build_elsewhere(job)))
        return key, artifact

    def take(self, job: Job, key: str | None, folder: Path) -> Artifact | None:
        """The artifact of ``key`` with its files in ``folder``, if the cache has it and it fits the job."""
        names = [model.name for model in job.models]

        def fits(record: Record) -> bool:
            same_models = [context.model for context in record.contexts] == names
            return same_models and record.product == job.target.provider.product

        return None if key is None else self._cache(job).take(key, folder, fits)

    def _cache(self, job: Job) -> Cache:
        """The cache for ``job``. A job with a secret uses none: a key would have to depend on the secret, and
        its hash could be guessed.
        """
        return Cache(None, self.log) if job.target.has_secrets else self.cache

    def _fingerprint(self, job: Job, versions: Mapping[str, str]) -> str:
        sha256 = {name: source.sha256 for name, source in self.sources.items()}
        given = job.target.calibration
        calibration = inputs_digest(given, self.index) if given else ""
        return fingerprint(job, sha256, versions, calibration)

    def _check_embeddable(self, job: Job) -> None:
        for model in job.models if job.target.settings.embed else ():
            if (size := self.sources[model.name].size) > PROTOBUF_LIMIT:
                message = (
                    "embed = true puts the compiled blob into an ONNX file, which cannot be larger "
                    f"than 2 GiB, and the model has {size / 2**30:.1f} GiB."
                )
                hint = "Remove embed: the blob is then a file beside the context model."
                raise BuildError(Problem(Kind.TOO_LARGE, "", message, hint))

    def _validate(
        self, job: Job, model: Model, key: str, artifact: Artifact, context: Context
    ) -> Validation:
        not_run = validation_without_run(job, model, self.executor.reason_not_to_run(job))
        if not_run and not job.target.from_cache:
            return not_run
        validated = validation_key(job, model, artifact.record, self.index)
        cached = self._cache(job).validation(key, validated)
        # If it was not run, the EP's device may be here now.
        if cached and (cached.status is ValidationStatus.RAN or job.target.from_cache):
            check_conclusive(job, model, cached)
            return cached
        if not_run:
            return not_run
        if job.target.from_cache:
            message = (
                "HATCH_EPCONTEXT_FROM_CACHE allows this target only from the cache, and the artifact in "
                "the cache was not validated with these inputs, this tolerance and these options."
                + self.cache.trouble
            )
            hint = _build_elsewhere(job)
            raise BuildError(Problem(Kind.NOT_CACHED, "", message, hint, step="validation"))
        with self._unchanged(job):
            validation = self.executor.validate(job, model, artifact, context)
        if validation.differs:
            return validation
        unavailable = validation.status is not ValidationStatus.RAN
        if unavailable and model.validate.mode == "require":
            raise not_run_error(job, model, validation.reason or "it was not run")
        check_conclusive(job, model, validation)
        self._cache(job).store_validation(key, validated, validation)
        return validation


class _Search:
    """Tries recipes for a job until one is whole and agrees with the CPU; each is validated at most once.

    ``wrong``: the validations of attempts that are known to differ, by their keys.
    """

    def __init__(
        self,
        runner: JobRunner,
        job: Job,
        fingerprint: str,
        cache: Cache,
        wrong: Mapping[str, Runs],
    ) -> None:
        self._runner = runner
        self._job = job
        self._fingerprint = fingerprint
        self._cache = cache
        self._folder = runner.staging / "attempts" / job.folder
        self._partial = value_sha256([fingerprint, "partial"])
        self._attempts: list[Attempt] = []
        self._validated: dict[str, Runs] = {**wrong}
        self._stored: set[str] = set()

    def run(self) -> tuple[Attempt, Artifact, Runs]:
        """The chosen attempt, its artifact and its validations; raises BuildError if none is good enough."""
        taken = (
            self._known_partial()
            or try_recipes(
                self._job, self._attempts, self._attempt, self._judge, dynamic=self._is_dynamic()
            )
            or self._choose()
        )
        runs = self._validated[taken.key]
        for each in self._attempts:
            if each is not taken and isinstance(each.result, Artifact):
                shutil.rmtree(each.result.folder, ignore_errors=True)
        return taken, replace(taken.artifact, record=self._record(taken)), runs

    def _is_dynamic(self) -> bool:
        """Whether a model is dynamically quantized."""
        sources = self._runner.sources
        return any(sources[model.name].facts.dynamic for model in self._job.models)

    def _known_partial(self) -> Attempt | None:
        """The best attempt of an earlier build in which none was whole, if it is good enough now."""
        key = self._cache.ref(self._partial, own_first=True)
        artifact = self._runner.take(self._job, key, self._folder / "partial")
        if key is None or artifact is None:
            return None
        attempt = Attempt(artifact.record.recipe, key, artifact, cached=True)
        if not acceptable(self._job, [attempt]) or self._judge(attempt).differs:
            return None
        self._attempts.append(attempt)
        return attempt

    def _attempt(self, recipe: Recipe, number: int) -> Attempt:
        """Compile the job with ``recipe``, unless the cache has the result."""
        key = value_sha256([self._fingerprint, to_plain(recipe)])
        folder = self._folder / f"attempt-{number}"
        if artifact := self._runner.take(self._job, key, folder):
            return Attempt(recipe, key, artifact, cached=True)
        result = self._runner.compile(self._job, recipe, folder)
        if isinstance(result, Refused):
            shutil.rmtree(folder, ignore_errors=True)
            return Attempt(recipe, key, result)
        return Attempt(recipe, key, Artifact(folder, result))

    def _choose(self) -> Attempt:
        """The attempt that covers most among those that cover enough and do not differ from the CPU.

        Raises BuildError if there is none: with the disagreement nearest to the limits, the nodes left to the
        CPU, or the EP's refusal, in that order.
        """
        found = best(self._attempts)
        if found.may_be_taken and not found.is_whole:
            self._store(found)
            self._cache.set_ref(self._partial, found.key)
        if (taken := chosen(self._job, self._attempts, self._judge)) is not None:
            return taken
        if wrong := [
            (self._margin(each) or 0.0, each, error)
            for each in self._attempts
            if (error := self._disagreement(each)) is not None
        ]:
            _, nearest, error = max(wrong, key=lambda each: each[0])
            raise _with_tried(error, self._notes(nearest))
        if found.may_be_taken:
            # The best of all forms: it leaves the user least to solve.
            most = max(filter(lambda e: e.may_be_taken, self._attempts), key=lambda e: e.share)
            try:
                # Always raises: an attempt that covers enough has disagreed above.
                _check_coverage(self._job, most.artifact.record)
            except BuildError as error:
                raise _with_tried(error, self._notes(most)) from None
        first, refused = refusal(self._job, self._attempts)
        raise _with_tried(refused, self._notes(first))

    def _judge(self, attempt: Attempt) -> Assessment:
        """Store the artifact; returns how near it is to the CPU, as far as it can be compared here."""
        if attempt.key not in self._validated:
            self._store(attempt)
            self._validated[attempt.key] = self._runner.validations(
                self._job, attempt.key, attempt.artifact
            )
        return self._verdict(self._validated[attempt.key])

    def _verdict(self, runs: Runs) -> Assessment:
        validations = runs.values()
        if differing := next((each for each in validations if each.differs), None):
            gap = math.inf if differing.gap is None else differing.gap
            return Assessment(agrees=False, margin=differing.margin, gap=gap)
        emulations = [each.emulation for each in validations if each.emulation is not None]
        # Simulators are slow with large models: rewrites for kernels are tried only if these differ.
        gaps = (each.gap for each in validations if each.gap is not None and not _is_large(each))
        return Assessment(
            not any(each.sensitive for each in validations),
            max(0.0, min((each.margin for each in validations), default=math.inf)),
            any(each.in_format for each in emulations),
            max(gaps, default=0.0),
            any(each.inexact for each in emulations),
        )

    def _store(self, attempt: Attempt) -> None:
        if not attempt.cached and attempt.key not in self._stored:
            self._stored.add(attempt.key)
            folder, record = attempt.artifact.folder, self._record(attempt)
            self._cache.put("artifacts", attempt.key, record, folder)

    def _disagreement(self, attempt: Attempt) -> BuildError | None:
        return _disagreement(self._validated.get(attempt.key, {}))

    def _margin(self, attempt: Attempt) -> float | None:
        found = self._validated.get(attempt.key)
        return None if found is None else self._verdict(found).margin

    def _notes(self, other_than: Attempt) -> tuple[str, ...]:
        """What else was tried, and its results."""
        notes = (
            note
            for each in self._attempts
            if each is not other_than
            for note in each.notes(self._disagreement(each), self._margin(each))
        )
        return tuple(dict.fromkeys(notes))

    def _record(self, attempt: Attempt) -> Record:
        """The record of ``attempt`` with what else was tried, and the simplifiers that failed."""
        record, tried = attempt.artifact.record, self._notes(attempt)
        unprepared = (
            each
            for each in self._attempts
            if each.stopped_in == "prepare" and each.recipe.dequantize == attempt.recipe.dequantize
        )
        failed = tuple(dict.fromkeys(note for each in unprepared for note in each.notes(None)))
        preparations = (
            replace(
                each,
                failed=tuple(dict.fromkeys((*each.failed, *failed))),
                tried=tuple(n for n in dict.fromkeys((*each.tried, *tried)) if n not in failed),
            )
            for each in record.preparations
        )
        return replace(record, preparations=tuple(preparations))


def _disagreement(runs: Runs) -> BuildError | None:
    """The error of the model that differs, if one does."""
    problems = [problem for validation in runs.values() for problem in validation.problems]
    return BuildError(*problems).located("", step="validation") if problems else None


def _is_large(validation: Validation) -> bool:
    """Whether the model is large: only few of its inputs were emulated."""
    emulation = validation.emulation
    return validation.synthetic and emulation is not None and 0 < emulation.samples <= FEW_SAMPLES


def _check_coverage(job: Job, record: Record) -> None:
    """Raise BuildError if less of a model was compiled than the job's target requires."""
    job = record.recipe.form_of(job)
    for model, context in zip(job.models, record.contexts, strict=True):
        check_coverage(context.coverage, job.target, model)


def _with_tried(error: BuildError, tried: tuple[str, ...]) -> BuildError:
    """``error`` with what else was ``tried``."""
    first, *others = error.problems
    return type(error)(replace(first, tried=tried), *others)


def _build_elsewhere(job: Job) -> str:
    return (
        f"Build it on a machine that can compile it: HATCH_EPCONTEXT_TARGETS={job.target.name}, "
        "with the same cache."
    )

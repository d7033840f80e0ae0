"""One job, from its fingerprint to its artifact.

What the cache has of a job, and by which identity it finds it, is in `keys`.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hatch_epcontext.cache.build import changed_error
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import (
    AccidentError,
    BuildError,
    Kind,
    Problem,
    Setting,
    Step,
    UnavailableError,
)
from hatch_epcontext.files import is_sha256
from hatch_epcontext.jobs.artifact import PACKAGE, Built
from hatch_epcontext.jobs.failure import failure
from hatch_epcontext.jobs.genai import answers_key, compare_answers
from hatch_epcontext.jobs.keys import artifact_key, fingerprint, search_key, terms_of
from hatch_epcontext.jobs.notes import best_note
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.failures import interrupted
from hatch_epcontext.jobs.recipe import Recipe, Record
from hatch_epcontext.jobs.search import Attempt, Search, most_complete
from hatch_epcontext.jobs.sources import input_files
from hatch_epcontext.jobs.stages import Lost, Try, Validate, Won, next_recipe
from hatch_epcontext.jobs.steps import Build, Steps, may_avoid
from hatch_epcontext.providers import Provider
from hatch_epcontext.worker.results import Answer, Nearness, Validated, Validation, ValidationStatus

_ANNOUNCED = 10.0
"""Seconds after which a job prints a line for each recipe."""


def run_job(build: Build, job: Job) -> Built:
    """Get the artifact of ``job`` from the cache or compile it, and validate it.

    Raises BuildError with the job's problems.
    """
    steps = Steps(build, build.scratch("prepared"))
    try:
        run = _JobRun(build, job, steps)
        built = run.read_cache() if job.target.from_cache else run.find_winner()
        return replace(built, answers=run.compare_answers(built))
    except BuildError as error:
        raise job.located(error) from error
    finally:
        shutil.rmtree(steps.folder, ignore_errors=True)


def store_result(build: Build, job: Job, built: Built) -> None:
    """Store what another machine ``built`` for ``job``."""
    cache, record = build.cache, built.record
    artifact = artifact_key(record.search, record.recipe)
    cache.put("artifacts", artifact, record, built.folder)
    cache.put("searches", record.search, built.search.to_store(build.day))
    cache.put("refs", fingerprint(build, job), artifact)
    if built.answers:
        cache.put("facts", answers_key(build, built), built.answers)


class _JobRun:
    """One job of ``build``, with the folders of what it has compiled or taken from the cache, by the keys of
    these artifacts, and the results of the jobs that are run instead of it, see `Job.jobs_alone`.
    """

    def __init__(self, build: Build, job: Job, steps: Steps) -> None:
        self._build, self._job, self._steps = build, job, steps
        self._fingerprint = fingerprint(build, job)
        self._key, self._start = "", time.monotonic()
        self._folders: dict[str, Path] = {}
        self._built_alone: dict[str, Built] = {}

    def find_winner(self) -> Built:
        """The winner of the job's search, which goes on where earlier builds ended."""
        cache, job = self._build.cache, self._job
        self._key = search_key(self._fingerprint, self._build.versions[job.target.name])
        search = self._replay(self._key)
        outcome: Try | Validate | Won | Lost = next_recipe(search)
        if not (isinstance(outcome, Won) and self._folder_of(outcome.attempt)):
            with cache.lock(self._key, self._wait):
                # Another build may have tried more recipes in the meantime.
                outcome, search = self._run(self._replay(self._key, latest=True))
        if isinstance(outcome, Lost):
            raise failure(job, search, outcome.attempts, self._build.jobs)
        winner = outcome.attempt
        key = artifact_key(self._key, winner.recipe)
        built = self._finish(search.won_by(winner), winner, self._folders[key])
        cache.put("refs", self._fingerprint, key)
        return built

    def read_cache(self) -> Built:
        """The latest artifact with the job's settings, whatever is installed."""
        cache = self._build.cache
        # Others may have made a newer one.
        key = cache.get("refs", self._fingerprint, str, fits=is_sha256, latest=True)
        record = self._load(key) if key else None
        if key is None or record is None:
            raise self._not_cached("the cache has no artifact of this model with these settings.")
        self._key, folder = record.search, self._folders[key]
        search = self._replay(record.search, latest=True)
        winner = search.attempt_with(record.recipe)
        if winner is None or winner.record != record:
            winner = Attempt(record.recipe, record, day=self._build.day)
        if search.is_enough(winner):
            winner = self._validate(search, winner, folder)
            search = search.adding(winner)
            if not search.differences(winner):
                return self._finish(search.won_by(winner), winner, folder)
        raise failure(self._job, search.adding(winner), (winner,), self._build.jobs)

    def _replay(self, key: str, *, latest: bool = False) -> Search:
        """The search with ``key`` as far as earlier builds went, with the validations that count here.

        The shared cache is asked with ``latest``, or if this machine knows nothing.
        """
        build, job = self._build, self._job
        sources = [build.sources[model.name] for model in job.models]
        search = Search(
            job.target.settings,
            terms_of(build, job),
            # For groups and contexts for several chips, other jobs are compared: see `Job.jobs_alone`.
            compares=job.group is None and not job.reason_not_to_open,
            is_dynamic=any(source.facts.dynamic for source in sources) and job.may_dequantize,
        )
        stored = build.cache.get("searches", key, Search, latest=latest)
        if stored is None:
            return search
        attempts = (attempt for attempt in stored.attempts if self._counts(attempt, search))
        known = tuple(self._with_known(attempt, search) for attempt in attempts)
        return replace(search, attempts=known, winners=stored.winners)

    def _counts(self, attempt: Attempt, search: Search) -> bool:
        """Whether the stored ``attempt`` says what would happen in ``search``."""
        # A shared cache may contain what no build has written.
        is_valid = self._fits(attempt.record) if attempt.record else attempt.stop is not None
        return is_valid and attempt.comparisons in ({}, search.terms.comparisons)

    def _with_known(self, attempt: Attempt, search: Search) -> Attempt:
        """``attempt``, with what is known of its models without running them."""
        job, validated = attempt.recipe.job_of(self._job), dict(attempt.validated)
        for model in job.models if attempt.record else ():
            comparison = search.terms.comparisons[model.name]
            stored = validated.pop(comparison, None)
            if (known := validation_without_run(job, model, stored)) is not None:
                validated[comparison] = known
        return replace(attempt, validated=validated)

    def _run(self, search: Search) -> tuple[Won | Lost, Search]:
        """Try what ``search`` needs, until an attempt wins, or none can; it is stored, whatever ends it."""
        before = search
        try:
            while True:
                outcome = next_recipe(search)
                if isinstance(outcome, Try):
                    search = search.adding(self._try(outcome.recipe, search))
                elif isinstance(outcome, Lost):
                    self._store(most_complete(outcome.attempts))
                    return outcome, search
                elif not (folder := self._folder_of(outcome.attempt)):
                    # Its artifact is gone from the cache: compile it again.
                    search = search.without(outcome.attempt)
                elif isinstance(outcome, Won):
                    search = search.won_by(outcome.attempt)
                    return outcome, search
                else:
                    self._store(outcome.attempt)
                    self._name(search, outcome.attempt.recipe)
                    validated = self._validate(search, outcome.attempt, folder, outcome.to_beat)
                    search = search.adding(validated)
        finally:
            if search is not before:
                stored = search.to_store(self._build.day)
                self._build.cache.put("searches", self._key, stored)

    def _try(self, recipe: Recipe, search: Search) -> Attempt:
        """An attempt to compile the job with ``recipe``, or the result that the cache has."""
        key = artifact_key(self._key, recipe)
        if known := self._load(key):
            return Attempt(recipe, known, day=self._build.day)
        if (line := self._name(search, recipe)) and time.monotonic() > self._start + _ANNOUNCED:
            until_now = f"(until now: {best_note(search)})"
            self._build.workers.report(f"{self._job.location}: {line} {until_now} ...")
        folder = self._new_folder()
        with self._files_unchanged():
            attempt = self._steps.attempt(recipe.job_of(self._job), recipe, folder)
        if attempt.record is not None:
            record = replace(attempt.record, search=self._key)
            self._folders[key] = folder
            return replace(attempt, record=record)
        shutil.rmtree(folder, ignore_errors=True)
        if attempt.stopped_in == "compile":
            return attempt
        # What was compared before compiling depends on the inputs and the tolerance.
        return replace(attempt, comparisons=search.terms.comparisons)

    def _name(self, search: Search, recipe: Recipe) -> str:
        """Name ``recipe`` in progress from now on, and return that; empty for the first one of ``search``."""
        names, location = self._build.workers.recipes, self._job.location
        recipes = [attempt.recipe for attempt in search.attempts]
        number = recipes.index(recipe) if recipe in recipes else len(recipes)
        names[location] = f"recipe {number + 1}: {recipe.name}" if number else ""
        return names[location]

    def _store(self, attempt: Attempt) -> None:
        """Store the artifact of ``attempt``, if it may be shipped and this build has compiled it."""
        if attempt.record is not None and attempt.may_ship and not attempt.day:
            key = artifact_key(self._key, attempt.recipe)
            self._build.cache.put("artifacts", key, attempt.record, self._folders[key])

    def _folder_of(self, attempt: Attempt) -> Path | None:
        """That of its artifact: of this build, or of the cache if it is still the same."""
        key = artifact_key(self._key, attempt.recipe)
        if key not in self._folders:
            self._load(key, attempt.record)
        return self._folders.get(key)

    def _load(self, key: str, expected: Record | None = None) -> Record | None:
        """The record of the artifact with ``key`` in the cache, if it is the ``expected`` one.

        Its folder is then in `_folders`.
        """
        folder = self._new_folder()
        record = self._build.cache.get(
            "artifacts",
            key,
            Record,
            folder,
            lambda record: self._fits(record) and expected in (None, record),
        )
        if record is not None:
            self._folders[key] = folder
        return record

    def _new_folder(self) -> Path:
        """Where the next artifact goes."""
        # Mostly the first is the winner, whose folder this is.
        own = self._build.staging / PACKAGE / self._job.folder
        return self._build.scratch("artifact") if own.exists() else own

    def _fits(self, record: Record) -> bool:
        """Whether ``record`` may be that of an artifact of the job."""
        is_covered = self._job.target.provider.has_coverage
        models = [(context.model, context.coverage is not None) for context in record.contexts]
        return models == [(model.name, is_covered) for model in self._job.models]

    def _validate(
        self, search: Search, attempt: Attempt, folder: Path, to_beat: Nearness | None = None
    ) -> Attempt:
        """``attempt``, whose models are run as far as the verdict needs it."""
        job = attempt.recipe.job_of(self._job)
        validated = self._with_known(attempt, search).validated
        for index, model in enumerate(job.models):
            comparison = search.terms.comparisons[model.name]
            if comparison not in validated:
                of_model = self._validate_model(job, index, attempt, folder, to_beat)
                validated = {**validated, comparison: of_model}
            if validated[comparison].validation.differs:
                break
        return replace(attempt, validated=validated)

    def _validate_model(
        self,
        job: Job,
        index: int,
        attempt: Attempt,
        folder: Path,
        to_beat: Nearness | None,
    ) -> Validated:
        """Validate a model of ``attempt``, or what is compiled alone if this machine cannot open that."""
        model = job.models[index]
        if job.target.from_cache:
            reason = (
                "the artifact in the cache was not validated with these inputs, this tolerance and these "
                "options."
            )
            raise self._not_cached(reason, step="validate")
        if reason := job.reason_not_to_open:
            others = (other for other in self._job.jobs_alone if other.models == (model,))
            built = map(self._compile_alone, others)
            return worst_alone([b.validated[model.name] for b in built], reason)
        with self._files_unchanged():
            try:
                assert attempt.record is not None, "only an artifact is validated"
                return self._steps.validate(job, index, folder, attempt.record, to_beat)
            except BuildError as error:
                if not may_avoid(error, attempt.recipe):
                    raise
                # Another artifact may run.
                failed = Validation(ValidationStatus.RAN, failures=error.problems)
                return Validated(failed, is_accident=isinstance(error, AccidentError))

    def _compile_alone(self, job: Job) -> Built:
        """The result of one of the jobs that are run instead of this one."""
        if job.folder not in self._built_alone:
            try:
                self._built_alone[job.folder] = _JobRun(self._build, job, self._steps).find_winner()
            except BuildError as error:
                raise job.located(error) from error
        return self._built_alone[job.folder]

    def compare_answers(self, built: Built) -> tuple[Answer, ...]:
        """What onnxruntime-genai answers with ``built``; see `genai.compare_answers`."""

        def results_to_run() -> Sequence[Built]:
            # Only a device opens contexts that share weights: another process would crash.
            return [*map(self._compile_alone, self._job.jobs_alone)] or [built]

        return compare_answers(self._build, built, results_to_run)

    def _finish(self, search: Search, winner: Attempt, folder: Path) -> Built:
        """The result; raises BuildError if more must be known of it."""
        job = winner.recipe.job_of(self._job)
        built = Built(job, folder, search, cached=bool(winner.day))
        for model in job.models:
            if model.validate.mode == "require":
                check_required(job, model, built.validations[model.name])
        return built

    @contextlib.contextmanager
    def _files_unchanged(self) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads has changed since the build hashed it."""
        sources = [self._build.sources[model.name] for model in self._job.models]
        models = [file for source in sources for file in source.files]
        calibration = self._job.target.calibration
        inputs = (calibration, *(model.validate.inputs for model in self._job.models))
        named = [path for path in inputs if path not in ("", *SYNTHETIC)]
        before = {file for path in named for file in input_files(path)}
        try:
            yield
        finally:
            # A file that has changed in the meantime may be the cause of an error too.
            for file in (*models, *sorted(before)):
                self._build.cache.index.sha256(file, again=True)
        if added := {file for path in named for file in input_files(path)} - before:
            raise changed_error(min(added))

    def _wait(self) -> None:
        workers = self._build.workers
        if workers.stopped:
            raise interrupted()
        if workers.is_report_due():
            waits = "waits for another job or build, which compiles the same"
            workers.report(f"{self._job.location}: {waits}")

    def _not_cached(self, reason: str, step: Step | None = None) -> BuildError:
        """The error of a job that only reads the cache."""
        message = f"{PREFIX}FROM_CACHE allows this target only from the cache, and {reason}"
        hint = (
            "Build it on a machine that can compile it: "
            f"{PREFIX}TARGETS={self._job.target.name}, with the same cache."
        )
        message += self._build.cache.trouble
        return BuildError(Problem(Kind.NOT_CACHED, "", message, hint, step=step))


def validation_without_run(
    job: Job, model: Model, stored: Validated | None = None
) -> Validated | None:
    """The validation of ``model`` if it must not be run, cannot be run here, or has a ``stored`` one."""
    mode = model.validate.mode
    if stored is not None and job.target.from_cache:
        return stored
    if mode is False:
        return Validated(Validation(ValidationStatus.NOT_VALIDATED))
    if mode == "structure":
        reason = 'validate = "structure"'
        return Validated(Validation(ValidationStatus.STRUCTURE, reason=reason))
    if not_here := reason_not_to_run(job.target.provider):
        return Validated(Validation(ValidationStatus.STRUCTURE, reason=not_here))
    # If it was not run, the EP's device may be here now.
    also = () if mode == "require" else (ValidationStatus.RAN_ALONE,)
    was_run = stored and stored.validation.status in (ValidationStatus.RAN, *also)
    return stored if was_run else None


def reason_not_to_run(provider: Provider) -> str | None:
    """Why artifacts of ``provider`` cannot be run on this machine, if that is known without the EP."""
    if provider.runs_on(sys.platform, platform.machine()):
        return None
    machine = f"({sys.platform}, {platform.machine()})"
    return f"{provider.ep} cannot run its contexts on this machine {machine}"


def worst_alone(validations: Sequence[Validated], reason: str) -> Validated:
    """The validation of a context that this machine cannot open because of ``reason``.

    ``validations``: those of the same model compiled alone, one for each chip; empty if none was run.
    """

    def nearness(validated: Validated) -> tuple[bool, bool, float]:
        validation = validated.validation
        was_run = validation.status is ValidationStatus.RAN
        return was_run, not validation.sensitive, validation.margin

    if not validations:
        return Validated(Validation(ValidationStatus.STRUCTURE, reason=reason))
    worst = min(validations, key=nearness)
    if worst.validation.status is not ValidationStatus.RAN:
        return worst
    # The session was one of the file that was compiled alone.
    own = replace(worst.validation, status=ValidationStatus.RAN_ALONE, reason=reason)
    return Validated(own, worst.batch)


def check_required(job: Job, model: Model, validation: Validation) -> None:
    """Raise BuildError if ``model``, which must be run, was not, or if its comparison is inconclusive."""
    validate = model.key / "validate"
    if validation.status is not ValidationStatus.RAN and not job.target.from_cache:
        only_mode = replace(model.validate, mode="auto") == ValidateTable()
        reason = validation.reason or "it was not run"
        raise UnavailableError(
            Problem(
                Kind.NOT_RUN,
                "",
                f'{reason.rstrip(".")}, and validate is "require".',
                "Build on another machine, or check only what this one can.",
                settings=(Setting(validate if only_mode else validate / "mode", "auto"),),
                step="validate",
            )
        )
    problems = [
        Problem(
            Kind.INCONCLUSIVE,
            "",
            f"the comparison of the output {agreement.output!r} is inconclusive, because "
            f'{agreement.reason}, and validate is "require".',
            "Give real inputs.",
            settings=(Setting(validate / "inputs", "samples.npz"),),
            step="validate",
        )
        for agreement in validation.inconclusive
    ]
    BuildError.check(problems)

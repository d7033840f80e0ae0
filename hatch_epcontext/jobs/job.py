"""One job, from its fingerprint to its artifact.

The cache has of a job:

- ``searches``, by its fingerprint (models, settings that change what is compiled; no paths) and versions:
  what was tried, see `search`. A build that tries more holds the lock of that key.
- ``artifacts``, by that key and a recipe: of an attempt, stored before its validation, or if it covers most.
- a ref, by the fingerprint alone: the key of the latest artifact, for builds from the cache.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import SYNTHETIC, Model
from hatch_epcontext.config.tables import ValidateTable
from hatch_epcontext.errors import BuildError, Kind, Problem, Setting, UnavailableError
from hatch_epcontext.files import FileRecord, is_sha256
from hatch_epcontext.jobs.artifact import PACKAGE, Artifact, Built, Recipe, Record
from hatch_epcontext.jobs.cache.build import Index, changed_error
from hatch_epcontext.jobs.failure import failure
from hatch_epcontext.jobs.plan import FORMAT, Job
from hatch_epcontext.jobs.processes.failures import interrupted
from hatch_epcontext.jobs.search import Attempt, Next, Search, most_complete, next_recipe
from hatch_epcontext.jobs.sources import input_files, inputs_digest
from hatch_epcontext.jobs.steps import Build, Steps
from hatch_epcontext.providers import Provider
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.worker.results import Context, Validation, ValidationStatus

_ANNOUNCED = 10.0
"""Seconds after which a job prints a line for each recipe."""


def run_job(build: Build, job: Job) -> Built:
    """Get the artifact of ``job`` from the cache or compile it, and validate it.

    Raises BuildError with the job's problems.
    """
    steps = Steps(build, build.scratch("prepared"))
    try:
        run = _JobRun(build, job, steps)
        return run.from_cache() if job.target.from_cache else run.search_on()
    except BuildError as error:
        raise job.located(error) from error
    finally:
        shutil.rmtree(steps.folder, ignore_errors=True)


def store_result(build: Build, job: Job, built: Built, search: Search) -> None:
    """Store what another machine ``built`` for ``job``, and its ``search``.

    Raises ValueError if that is the search for another job.
    """
    run = _JobRun(build, job, Steps(build, build.scratch("prepared")))
    record, cache = built.artifact.record, build.cache
    key = value_sha256([run.fingerprint, record.versions])
    attempt = search.attempts.get(record.recipe.key(key))
    if attempt is None or attempt.record is None or attempt.record.files != record.files:
        raise ValueError("it has searched for another job")
    cache.put("artifacts", attempt.key, attempt.record, built.artifact.folder)
    cache.put("searches", key, search)
    cache.put("refs", run.fingerprint, attempt.key)


class _JobRun:
    """One job of ``build``; ``fingerprint``: that of the `Job`."""

    def __init__(self, build: Build, job: Job, steps: Steps) -> None:
        self._build, self._job, self._steps = build, job, steps
        self._cache, self._index = build.cache, build.cache.index
        sources = [build.sources[model.name] for model in job.models]
        self._files = [file for source in sources for file in source.files]
        inputs = (job.target.calibration, *(model.validate.inputs for model in job.models))
        self._inputs = [path for path in inputs if path not in ("", *SYNTHETIC)]
        calibration = job.target.calibration and inputs_digest(job.target.calibration, self._index)
        self.fingerprint = job.fingerprint([source.sha256 for source in sources], calibration)
        self._place = build.staging / PACKAGE / job.folder
        required = value_sha256(
            [
                [validation_key(job, model, {}, self._index), str(model.validate.mode)]
                for model in job.models
            ]
        )
        self._search = self._new = Search(
            job.target.settings,
            job.target.min_coverage,
            # For groups and contexts for several chips, other jobs are compared: see `Job.alone`.
            compares=job.group is None and not job.reason_not_to_open,
            is_dynamic=any(source.facts.dynamic for source in sources) and job.may_dequantize,
            required=required,
        )
        self._key, self._start = "", time.monotonic()
        self._artifacts: dict[str, Artifact] = {}
        self._alone: dict[str, Built] = {}

    def search_on(self) -> Built:
        """The winner of the job's search."""
        versions = self._build.versions[self._job.target.name]
        self._key = value_sha256([self.fingerprint, versions])
        self._search = self.stored(self._key)
        step = next_recipe(self._search)
        if step.winner is None or not self._artifact(step.winner.key, step.winner.record):
            with self._cache.lock(self._key, self._wait):
                # Another build may have tried more in the meantime.
                self._search = self.stored(self._key, latest=True)
                step = self._try_all()
        if step.winner is None:
            raise failure(self._job, step.tried, self._build.jobs)
        built = self._built(step.winner, step.tried)
        self._cache.put("refs", self.fingerprint, step.winner.key)
        return built

    def from_cache(self) -> Built:
        """The latest artifact with the job's settings, whatever is installed."""
        # Others may have made a newer one.
        key = self._cache.get("refs", self.fingerprint, str, fits=is_sha256, latest=True)
        artifact = key and self._artifact(key)
        if not key or not artifact:
            raise self._not_cached("the cache has no artifact of this model with these settings.")
        record = artifact.record
        winner = Attempt(record.recipe, key, record, day=self._build.day)
        self._search = self.stored(record.search, latest=True)
        if self._search.is_enough(winner):
            self._search = self._validated(self._search, winner, artifact)
            winner = self._search.attempts[key]
            if not winner.differences:
                return self._built(winner, next_recipe(self._search).tried)
        raise failure(self._job, [winner], self._build.jobs)

    def stored(self, key: str, *, latest: bool = False) -> Search:
        """The search with ``key`` as far as earlier builds went, with the validations that the job requires.

        The shared cache is asked with ``latest``, or if this machine knows nothing.
        """
        stored = self._cache.get("searches", key, Search, latest=latest)
        if stored is None:
            return self._new
        search = replace(self._new, validations=stored.validations, winners=stored.winners)
        for name, attempt in stored.attempts.items():
            # A shared cache may contain what no build has written.
            is_own = name == attempt.key == attempt.recipe.key(key)
            fits = attempt.refused if attempt.record is None else self._fits(attempt.record)
            if is_own and fits and attempt.required in ("", search.required):
                search = self._validated(search, attempt)
        return search

    def _try_all(self) -> Next:
        """Try what the search needs, until an attempt wins, or none can; it is stored, whatever ends it."""
        stored = self._search
        try:
            while True:
                step = next_recipe(self._search)
                attempt = step.attempt or step.winner
                if step.recipe is not None:
                    self._try(step.recipe)
                elif attempt is None:
                    self._store(most_complete(step.tried))
                    return step
                elif not (artifact := self._artifact(attempt.key, attempt.record)):
                    others = {k: a for k, a in self._search.attempts.items() if k != attempt.key}
                    self._search = replace(self._search, attempts=others)
                elif step.winner is not None:
                    self._search = self._search.won_by(attempt, step.tried)
                    return step
                else:
                    self._store(attempt)
                    self._search = self._validated(self._search, attempt, artifact)
        finally:
            if self._search is not stored:
                search = self._search.to_store(self._build.day)
                self._cache.put("searches", self._key, search)

    def _try(self, recipe: Recipe) -> None:
        """Add an attempt to compile the job with ``recipe``, unless the cache has the result."""
        key, folder = recipe.key(self._key), self._build.scratch("artifact")
        if artifact := self._artifact(key):
            attempt = Attempt(recipe, key, artifact.record, day=self._build.day)
            self._search = self._validated(self._search, attempt)
            return
        workers, place = self._build.workers, self._job.location
        if number := len(self._search.attempts):
            # The first one needs no name.
            line = workers.recipes[place] = f"recipe {number + 1}: {recipe.name}"
            if workers.progress and time.monotonic() > self._start + _ANNOUNCED:
                workers.progress(f"{place}: {line} ...")
                workers.pulse.mark_reported()
        with self._files_unchanged():
            result = self._steps.compile(recipe.form_of(self._job), recipe, folder)
        if isinstance(result, Record):
            record = replace(result, search=self._key)
            self._artifacts[key] = Artifact(folder, record)
            attempt = Attempt(recipe, key, record)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            # What was compared in the other steps depends on the inputs and the tolerance.
            required = "" if result.step == "compile" else self._search.required
            attempt = Attempt(recipe, key, refused=result, required=required)
        self._search = self._search.adding(attempt)

    def _store(self, attempt: Attempt) -> None:
        """Store the artifact of ``attempt``, if it may be shipped and this build has compiled it."""
        if attempt.record is not None and attempt.may_ship and not attempt.day:
            folder = self._artifacts[attempt.key].folder
            self._cache.put("artifacts", attempt.key, attempt.record, folder)

    def _artifact(self, key: str, expected: Record | None = None) -> Artifact | None:
        """The artifact with ``key``: of this build, or of the cache if its record is the ``expected`` one."""
        if key not in self._artifacts:
            # Mostly it is the winner, whose place this is.
            folder = self._build.scratch("artifact") if self._place.exists() else self._place
            record = self._cache.get(
                "artifacts",
                key,
                Record,
                folder,
                lambda record: self._fits(record) and expected in (None, record),
            )
            if record is not None:
                self._artifacts[key] = Artifact(folder, record)
        return self._artifacts.get(key)

    def _fits(self, record: Record) -> bool:
        """Whether ``record`` may be that of an artifact of the job."""
        is_covered = self._job.target.provider.product == "context"
        models = [(context.model, context.coverage is not None) for context in record.contexts]
        return models == [(model.name, is_covered) for model in self._job.models]

    def _validated(
        self, search: Search, attempt: Attempt, artifact: Artifact | None = None
    ) -> Search:
        """``search`` with ``attempt`` and its validations. Without its ``artifact`` none is run for them."""
        record, form = attempt.record, attempt.recipe.form_of(self._job)
        if record is None:
            return search.adding(attempt)
        stored, validations = dict(search.validations), dict[str, Validation]()
        for model, context in zip(form.models, record.contexts, strict=True):
            key = validation_key(form, model, record.files, self._index)
            validation = validation_without_run(form, model, stored.get(key))
            if validation is None:
                if artifact is None:
                    return search.adding(replace(attempt, validations={}))
                validation = stored[key] = self._validate(form, model, artifact, context)
            validations[model.name] = validation
            if validation.differs:
                break
        return replace(search, validations=stored).adding(replace(attempt, validations=validations))

    def _validate(
        self, form: Job, model: Model, artifact: Artifact, context: Context
    ) -> Validation:
        """Validate a model of ``artifact``, or what is compiled alone if this machine cannot open that."""
        if form.target.from_cache:
            reason = (
                "the artifact in the cache was not validated with these inputs, this tolerance and these "
                "options."
            )
            raise self._not_cached(reason, step="validation")
        if reason := form.reason_not_to_open:
            alone = [job for job in self._job.alone if job.models == (model,)]
            for job in alone:
                if job.folder not in self._alone:
                    try:
                        run = _JobRun(self._build, job, self._steps)
                        self._alone[job.folder] = run.search_on()
                    except BuildError as error:
                        raise job.located(error) from error
            built = (self._alone[job.folder] for job in alone)
            return worst_of_alone([b.validations[model.name] for b in built], reason)
        with self._files_unchanged():
            return self._steps.validate(form, model, artifact, context)

    def _built(self, winner: Attempt, tried: Sequence[Attempt]) -> Built:
        """The result, with what else was ``tried``; raises BuildError if more must be known of it."""
        form, artifact = winner.recipe.form_of(self._job), self._artifacts[winner.key]
        for model in form.models:
            if model.validate.mode == "require":
                check_required(form, model, winner.validations[model.name])
        win = self._search.won_by(winner, tried).winners[self._search.terms]
        preparations = (
            replace(done, tried=tuple(dict.fromkeys((*done.tried, *win.tried))))
            for done in artifact.record.preparations
        )
        record = replace(artifact.record, preparations=tuple(preparations))
        artifact = Artifact(artifact.folder, record)
        return Built(form, artifact, winner.validations, cached=bool(winner.day))

    @contextlib.contextmanager
    def _files_unchanged(self) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads has changed since the build hashed it."""
        before = {file for path in self._inputs for file in input_files(path)}
        try:
            yield
        finally:
            # A file that has changed in the meantime may be the cause of an error too.
            for file in (*self._files, *sorted(before)):
                self._index.sha256(file, again=True)
        if added := {file for path in self._inputs for file in input_files(path)} - before:
            raise changed_error(min(added))

    def _wait(self) -> None:
        workers = self._build.workers
        if workers.stopped:
            raise interrupted()
        if workers.progress and workers.pulse.due():
            waits = "waits for another job or build, which compiles the same"
            workers.progress(f"{self._job.location}: {waits}")

    def _not_cached(self, reason: str, step: str = "") -> BuildError:
        """The error of a job that only reads the cache."""
        message = f"{PREFIX}FROM_CACHE allows this target only from the cache, and {reason}"
        hint = (
            "Build it on a machine that can compile it: "
            f"{PREFIX}TARGETS={self._job.target.name}, with the same cache."
        )
        message += self._cache.trouble
        return BuildError(Problem(Kind.NOT_CACHED, "", message, hint, step=step))


def validation_key(job: Job, model: Model, files: Mapping[str, FileRecord], index: Index) -> str:
    """What identifies the validation of ``model`` in an artifact with these ``files``."""
    return value_sha256(
        [
            *(FORMAT, model.name, inputs_digest(model.validate.inputs, index)),
            *(model.tolerance_for(job.target), model.validate.states, job.target.load_options),
            {name: file.sha256 for name, file in files.items()},
        ]
    )


def validation_without_run(
    job: Job, model: Model, stored: Validation | None = None
) -> Validation | None:
    """The validation of ``model`` if it must not be run, cannot be run here, or has a ``stored`` one."""
    mode = model.validate.mode
    if stored is not None and job.target.from_cache:
        return stored
    if mode is False:
        return Validation(ValidationStatus.NOT_VALIDATED)
    if mode == "structure":
        return Validation(ValidationStatus.STRUCTURE, reason='validate = "structure"')
    if reason := reason_not_to_run(job.target.provider):
        return Validation(ValidationStatus.STRUCTURE, reason=reason)
    # If it was not run, the EP's device may be here now.
    alone = () if mode == "require" else (ValidationStatus.RAN_ALONE,)
    return stored if stored and stored.status in (ValidationStatus.RAN, *alone) else None


def reason_not_to_run(provider: Provider) -> str | None:
    """Why artifacts of ``provider`` cannot be run on this machine, if that is known without the EP."""
    if provider.runs_on(sys.platform, platform.machine()):
        return None
    machine = f"({sys.platform}, {platform.machine()})"
    return f"{provider.ep} cannot run its contexts on this machine {machine}"


def worst_of_alone(alone: Sequence[Validation], reason: str) -> Validation:
    """The validation of a context that this machine cannot open because of ``reason``.

    ``alone``: the validations of the same model compiled alone, one for each chip; empty if none was run.
    """
    if not alone:
        return Validation(ValidationStatus.STRUCTURE, reason=reason)
    worst = min(alone, key=lambda v: (v.status is ValidationStatus.RAN, not v.sensitive, v.margin))
    if worst.status is not ValidationStatus.RAN:
        return worst
    # The session was one of the file that was compiled alone.
    return replace(worst, status=ValidationStatus.RAN_ALONE, reason=reason, load=None, day="")


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
                "Build on another machine, or check only what this one can:",
                settings=(Setting(validate if only_mode else validate / "mode", "auto"),),
                step="validation",
            )
        )
    problems = [
        Problem(
            Kind.INCONCLUSIVE,
            "",
            f"the comparison of the output {agreement.output!r} is inconclusive, because "
            f'{agreement.reason}, and validate is "require".',
            "Give real inputs:",
            settings=(Setting(validate / "inputs", "samples.npz"),),
            step="validation",
        )
        for agreement in validation.inconclusive
    ]
    if problems:
        raise BuildError(*problems)

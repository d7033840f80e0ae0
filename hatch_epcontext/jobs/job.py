"""One job, from its fingerprint to its artifact.

The cache has of a job:

- ``searches``, by its fingerprint (models, settings that change what is compiled, versions; no paths): what
  was tried, see `search`. A build that tries more holds the lock of that key.
- ``artifacts``, by fingerprint and recipe: of an attempt, stored before its validation, or if it covers most.
- a ref, by the fingerprint without versions: the key of the latest artifact, for builds from the cache.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import Model, Target
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.files import is_sha256
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.artifact import PACKAGE, Artifact, Built, Recipe, Record
from hatch_epcontext.jobs.cache.build import changed_error
from hatch_epcontext.jobs.failure import failure
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.failures import interrupted
from hatch_epcontext.jobs.search import Attempt, Next, Search, most_complete, next_recipe
from hatch_epcontext.jobs.steps import Build, Steps
from hatch_epcontext.jobs.validation import (
    check_conclusive,
    input_files,
    inputs_digest,
    not_run_error,
    validation_key,
    validation_of_alone,
    validation_without_run,
)
from hatch_epcontext.serialize import value_sha256
from hatch_epcontext.worker.results import Context, Validation, ValidationStatus

_ANNOUNCED = 10.0
"""Seconds after which a job prints a line for each recipe."""


def run_job(build: Build, job: Job) -> Built:
    """Get the artifact of ``job`` from the cache or compile it, and validate it.

    Raises BuildError with the job's problems.
    """
    with contextlib.closing(Steps(build)) as steps:
        return _JobRun(build, job, steps).run()


def keep(build: Build, job: Job, built: Built, search: Search) -> None:
    """Store what another machine ``built`` for ``job``, and its ``search``.

    Raises ValueError if that is the search for another job.
    """
    run, record, cache = _JobRun(build, job, Steps(build)), built.artifact.record, build.cache
    key = value_sha256([run.settings, record.versions])
    attempt = search.attempts.get(record.recipe.key(key))
    if attempt is None or attempt.record is None or attempt.record.files != record.files:
        raise ValueError("it has searched for another job")
    cache.put("artifacts", attempt.key, attempt.record, built.artifact.folder)
    cache.put("searches", key, search)
    cache.put("refs", run.settings, attempt.key)


class _JobRun:
    """One job of ``build``; ``settings`` is its key without versions."""

    def __init__(self, build: Build, job: Job, steps: Steps) -> None:
        self._build, self._job, self._steps = build, job, steps
        self._cache, self._index = build.cache, build.cache.index
        inputs = job.target.calibration
        sha256 = {name: source.sha256 for name, source in build.sources.items()}
        self.settings = job.key(sha256, inputs_digest(inputs, self._index) if inputs else "")
        self._place = build.staging / PACKAGE / job.folder
        self._search = Search(job.target.settings)
        self._key, self._start = "", time.monotonic()
        self._artifacts: dict[str, Artifact] = {}
        self._alone: dict[str, Built] = {}

    def run(self) -> Built:
        """The job's result; raises BuildError with its problems."""
        with self._job.locating():
            return self.from_cache() if self._job.target.from_cache else self.search_on()

    def search_on(self) -> Built:
        """The winner of the job's search."""
        self._key = value_sha256([self.settings, self._build.versions(self._job.target)])
        self._search = self.stored(self._key)
        step = next_recipe(self._search)
        has_won = step.winner and self._artifact(step.winner)
        if not has_won and (step.recipe or step.attempt or step.winner):
            self._check_embeddable()
            with self._cache.lock(self._key, self._wait):
                # Another build may have tried more in the meantime.
                self._search = self.stored(self._key, latest=True)
                step = self._try_all()
        if step.winner is None:
            raise failure(self._job, step.tried, self._targets())
        built = self._built(step.winner)
        self._cache.put("refs", self.settings, step.winner.key)
        return built

    def _targets(self) -> list[Target]:
        return [job.target for job in self._build.jobs]

    def from_cache(self) -> Built:
        """The latest artifact with the job's settings, whatever is installed."""
        # Others may have made a newer one.
        key = self._cache.get("refs", self.settings, str, fits=is_sha256, latest=True)
        record = None if key is None else self._take(key, self._place)
        if key is None or record is None:
            raise self._not_cached("the cache has no artifact of this model with these settings.")
        attempt = Attempt(record.recipe, key, record, day=_today())
        self._search = self.stored(record.search, latest=True)
        if not self._search.is_enough(attempt):
            raise failure(self._job, [attempt], self._targets())
        self._search = self._validated(self._search, attempt, self._artifacts[key])
        winner = self._search.attempts[key]
        if winner.differences:
            raise failure(self._job, [winner], self._targets())
        return self._built(winner)

    def stored(self, key: str, *, latest: bool = False) -> Search:
        """The search with ``key`` as far as earlier builds went, with the validations that the job requires.

        The shared cache is asked with ``latest``, or if this machine knows nothing.
        """
        job, sources = self._job, self._build.sources
        is_dynamic = any(sources[model.name].facts.dynamic for model in job.models)
        required = [
            [validation_key(job, model, {}, self._index), str(model.validate.mode)]
            for model in job.models
        ]
        search = Search(
            job.target.settings,
            job.target.min_coverage,
            # For groups and contexts for several chips, other jobs are compared: see `Job.alone`.
            compares=job.group is None and not job.needs_device,
            is_dynamic=is_dynamic and job.may_dequantize,
            required=value_sha256(required),
        )
        stored = self._cache.get("searches", key, Search, latest=latest)
        if stored is None:
            return search
        search = replace(search, validations=stored.validations, winners=stored.winners)
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
                    self._keep(most_complete(step.tried))
                    return step
                elif not (artifact := self._artifact(attempt)):
                    others = {k: a for k, a in self._search.attempts.items() if k != attempt.key}
                    self._search = replace(self._search, attempts=others)
                elif step.winner is not None:
                    self._search = self._search.won_by(attempt)
                    return step
                else:
                    self._keep(attempt)
                    self._search = self._validated(self._search, attempt, artifact)
        finally:
            if self._search is not stored:
                self._cache.put("searches", self._key, self._search.to_store(_today()))

    def _try(self, recipe: Recipe) -> None:
        """Add an attempt to compile the job with ``recipe``, unless the cache has the result."""
        key, folder = recipe.key(self._key), self._build.scratch("artifact")
        if record := self._take(key, folder):
            attempt = Attempt(recipe, key, record, day=_today())
            self._search = self._validated(self._search, attempt)
            return
        self._announce(recipe)
        with self._unchanged():
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

    def _announce(self, recipe: Recipe) -> None:
        """Let progress name a ``recipe`` that is not the first; a job that takes long does so at once."""
        workers, place = self._build.workers, self._job.location
        if self._search.attempts:
            line = f"recipe {len(self._search.attempts) + 1}: {recipe.name}"
            workers.recipes[place] = line
            if workers.progress and time.monotonic() > self._start + _ANNOUNCED:
                workers.progress(f"{place}: {line} ...")
                workers.pulse.mark_reported()

    def _keep(self, attempt: Attempt) -> None:
        """Store the artifact of ``attempt``, if it may be shipped and this build has compiled it."""
        if attempt.record is not None and attempt.may_ship and not attempt.day:
            folder = self._artifacts[attempt.key].folder
            self._cache.put("artifacts", attempt.key, attempt.record, folder)

    def _artifact(self, attempt: Attempt) -> Artifact | None:
        """The artifact of ``attempt``: of this build, or of the cache if it is the same there."""
        if attempt.record is None or attempt.key in self._artifacts:
            return self._artifacts.get(attempt.key)
        # Mostly it is the winner, whose place this is.
        folder = self._build.scratch("artifact") if self._place.exists() else self._place
        if self._take(attempt.key, folder) == attempt.record:
            return self._artifacts[attempt.key]
        shutil.rmtree(folder, ignore_errors=True)
        self._artifacts.pop(attempt.key, None)
        return None

    def _take(self, key: str, folder: Path) -> Record | None:
        """The record of the artifact with ``key`` if the cache has it, with its files in ``folder``."""
        record = self._cache.get("artifacts", key, Record, folder, self._fits)
        if record is not None:
            self._artifacts[key] = Artifact(folder, record)
        return record

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
                validation = stored[key] = self._run(form, model, artifact, context)
            validations[model.name] = validation
            if validation.differs:
                break
        return replace(search, validations=stored).adding(replace(attempt, validations=validations))

    def _run(self, form: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Validate a model of ``artifact``; raises BuildError if it must be run and was not."""
        if form.target.from_cache:
            reason = (
                "the artifact in the cache was not validated with these inputs, this tolerance and these "
                "options."
            )
            raise self._not_cached(reason, step="validation")
        if form.needs_device:
            alone = [job for job in self._job.alone if job.models == (model,)]
            for job in alone:
                if job.folder not in self._alone:
                    run = _JobRun(self._build, job, self._steps)
                    self._alone[job.folder] = run.run()
            built = (self._alone[job.folder] for job in alone)
            return validation_of_alone(form, model, [b.validations[model.name] for b in built])
        with self._unchanged():
            validation = self._steps.validate(form, model, artifact, context)
        is_run = validation.differs or validation.status is ValidationStatus.RAN
        if not is_run and model.validate.mode == "require":
            raise not_run_error(form, model, validation.reason or "it was not run")
        return validation

    def _built(self, winner: Attempt) -> Built:
        """The result, with what else was tried; raises BuildError if more must be known of it."""
        form, artifact = winner.recipe.form_of(self._job), self._artifacts[winner.key]
        for model in form.models:
            check_conclusive(form, model, winner.validations[model.name])
        win = self._search.won_by(winner).winners[self._search.terms]
        preparations = (
            replace(done, tried=tuple(dict.fromkeys((*done.tried, *win.tried))))
            for done in artifact.record.preparations
        )
        record = replace(artifact.record, preparations=tuple(preparations))
        artifact = Artifact(artifact.folder, record)
        return Built(form, artifact, winner.validations, cached=bool(winner.day))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads has changed since the build hashed it."""
        files = self._files()
        try:
            yield
        finally:
            # A file that has changed in the meantime may be the cause of an error too.
            for file in files:
                self._index.sha256(file, again=True)
        if added := set(self._files()).difference(files):
            raise changed_error(min(added))

    def _files(self) -> list[Path]:
        """All files that compiling and validating the job read."""
        job = self._job
        inputs = [job.target.calibration, *(model.validate.inputs for model in job.models)]
        sources = [self._build.sources[model.name] for model in job.models]
        return [
            *(file for source in sources for file in source.files),
            *(file for folder in filter(None, inputs) for file in input_files(folder)),
        ]

    def _check_embeddable(self) -> None:
        for model in self._job.models if self._job.target.settings.embed else ():
            if (size := self._build.sources[model.name].size) > PROTOBUF_LIMIT:
                message = (
                    "embed = true puts the compiled blob into an ONNX file, which cannot be larger "
                    f"than 2 GiB, and the model has {size / 2**30:.1f} GiB."
                )
                hint = "Remove embed: the blob is then a file beside the context model."
                raise BuildError(Problem(Kind.TOO_LARGE, "", message, hint))

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


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()

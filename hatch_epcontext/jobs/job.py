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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime, timezone
from pathlib import Path

from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import BuildError, Key, Kind, Problem, Setting
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.facts import PROTOBUF_LIMIT
from hatch_epcontext.jobs.artifact import (
    PACKAGE,
    Artifact,
    Built,
    Recipe,
    Record,
    Source,
)
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.cache.fingerprint import fingerprint, value_sha256
from hatch_epcontext.jobs.cache.index import Index, changed_error
from hatch_epcontext.jobs.coverage import low_coverage
from hatch_epcontext.jobs.plan import Job
from hatch_epcontext.jobs.processes.failures import interrupted
from hatch_epcontext.jobs.processes.process import Heartbeat
from hatch_epcontext.jobs.search import Attempt, Search, most_complete, next_recipe, notes
from hatch_epcontext.jobs.steps import Steps
from hatch_epcontext.jobs.validation import (
    check_conclusive,
    input_files,
    inputs_digest,
    not_run_error,
    reason_not_to_run,
    validation_key,
    validation_of_alone,
    validation_settings,
    validation_without_run,
)
from hatch_epcontext.serialize import to_plain
from hatch_epcontext.worker.results import Context, Validation, ValidationStatus


@dataclass(frozen=True)
class JobRunner:
    """Runs the jobs of one build; ``log`` gets a line when a job waits for another build."""

    sources: Mapping[str, Source]
    cache: Cache
    index: Index
    steps: Steps
    staging: Path
    log: Callable[[str], None]
    _built_alone: dict[str, Built] = field(default_factory=dict)
    _tried_now: set[str] = field(default_factory=set)

    def run(self, job: Job) -> Built:
        """Get the job's artifact from the cache or compile it, and validate it.

        Raises BuildError with the job's problems.
        """
        try:
            with job.locating():
                return self._from_cache(job) if job.target.from_cache else self._searched(job)
        finally:
            self.steps.finished(job)

    def dry_run(self, job: Job) -> tuple[str, bool]:
        """The job's fingerprint, and whether the cache has its artifact; nothing is compiled.

        For a job that only reads the cache it is the fingerprint without versions.
        """
        if job.target.from_cache:
            fingerprint = self._fingerprint(job, {})
            key = self.cache.ref(fingerprint)
        else:
            with job.locating():
                fingerprint = self._fingerprint(job, self.steps.versions(job))
            won = self._stored(job, fingerprint).won
            key = None if won is None else won.key
        record = None if key is None else self._cache(job).get("artifacts", key, Record)
        return fingerprint, record is not None

    def keep(self, job: Job, built: Built, search: Search) -> None:
        """Store what another machine ``built`` for ``job``, and its ``search``.

        Raises ValueError if that is the search for another job.
        """
        record, form = built.artifact.record, built.job
        fingerprint = self._fingerprint(job, record.versions)
        attempt = search.known(_key(fingerprint, record.recipe))
        if attempt is None or attempt.record is None or attempt.record.files != record.files:
            raise ValueError("it has searched for another job")
        alone = {
            validation_key(form, model, record, self.index): built.validations[model.name]
            for model in form.models
            if built.validations[model.name].status is ValidationStatus.RAN_ALONE
        }
        search = replace(search, validations={**search.validations, **alone})
        self.cache.put("artifacts", attempt.key, attempt.record, built.artifact.folder)
        self.cache.put("searches", fingerprint, search)
        self.cache.set_ref(self._fingerprint(job, {}), attempt.key)

    def _searched(self, job: Job) -> Built:
        """The winner of the job's search, which goes on from what earlier builds tried."""
        cache, place = self._cache(job), self.staging / PACKAGE / job.folder
        fingerprint = self._fingerprint(job, self.steps.versions(job))
        search = self._stored(job, fingerprint)
        step = next_recipe(search)
        artifact = self._artifact(job, step.winner, place) if step.winner else None
        if artifact is None and any((step.recipe, step.attempt, step.winner)):
            self._check_embeddable(job)
            with cache.lock(fingerprint, self._waiting(job)):
                # Another build may have tried more in the meantime.
                stored = self._stored(job, fingerprint, latest=True)
                search = self._tried(job, fingerprint, stored)
            step = next_recipe(search)
            artifact = self._artifact(job, step.winner, place) if step.winner else None
        if step.winner is None or artifact is None:
            raise failure(job, step.tried, self._tried_now)
        built = self._built(job, search, step.winner, artifact)
        cache.set_ref(self._fingerprint(job, {}), step.winner.key)
        return built

    def _stored(self, job: Job, fingerprint: str, *, latest: bool = False) -> Search:
        """What earlier builds tried, with the validations that the job requires, as far as they are known.

        The shared cache is asked with ``latest``, or if this machine knows nothing.
        """
        is_dynamic = any(self.sources[model.name].facts.dynamic for model in job.models)
        required = [
            [validation_settings(job, model, self.index), str(model.validate.mode)]
            for model in job.models
        ]
        search = Search(
            job.target.settings,
            job.target.min_coverage,
            # For groups and contexts for several chips, other jobs are compared: see `Job.alone`.
            compares=job.group is None and not job.has_several_chips,
            is_dynamic=is_dynamic and len(job.forms) > 1,
            required=value_sha256(required),
        )
        cache = self._cache(job)
        get = cache.get_latest if latest else cache.get
        stored = get("searches", fingerprint, Search)
        if stored is None:
            return search
        search = replace(search, validations=stored.validations, winners=stored.winners)
        for attempt in stored.attempts:
            # A shared cache may contain what no build has written.
            is_own = attempt.key == _key(fingerprint, attempt.recipe)
            fits = attempt.refused if attempt.record is None else _fits(job, attempt.record)
            if is_own and fits and attempt.required in ("", search.required):
                search = self._validated(job, search, attempt)
        return search

    def _tried(self, job: Job, fingerprint: str, stored: Search) -> Search:
        """The search with all attempts that it needs, and files of its winner; stored, whatever ends it."""
        cache, search = self._cache(job), stored
        try:
            while True:
                step = next_recipe(search)
                attempt = step.attempt or step.winner
                if step.recipe is not None:
                    search = self._attempted(job, fingerprint, search, step.recipe)
                elif attempt is None:
                    self._keep(job, most_complete(step.tried))
                    return search
                elif not (artifact := self._artifact(job, attempt, self._folder(job, attempt.key))):
                    search = search.without(attempt)
                elif step.winner is not None:
                    return (search := search.won_by(attempt))
                else:
                    self._keep(job, attempt)
                    search = self._validated(job, search, attempt, artifact)
        finally:
            if search is not stored:
                cache.put("searches", fingerprint, search.to_store(_today()))

    def _attempted(self, job: Job, fingerprint: str, search: Search, recipe: Recipe) -> Search:
        """The search with an attempt to compile the job with ``recipe``, unless the cache has the result."""
        key = _key(fingerprint, recipe)
        self._tried_now.add(key)
        folder = self._folder(job, key)
        if record := self._take(job, key, folder):
            return self._validated(job, search, Attempt(recipe, key, record, day=_today()))
        with self._unchanged(job):
            result = self.steps.compile(recipe.form_of(job), recipe, folder)
        if isinstance(result, Record):
            return search.adding(Attempt(recipe, key, replace(result, search=fingerprint)))
        shutil.rmtree(folder, ignore_errors=True)
        # What was compared in the other steps depends on the inputs and the tolerance.
        required = "" if result.step == "compile" else search.required
        return search.adding(Attempt(recipe, key, refused=result, required=required))

    def _keep(self, job: Job, attempt: Attempt) -> None:
        """Store the artifact of ``attempt``, if it may be shipped and this build has compiled it."""
        if attempt.record is not None and attempt.may_ship and not attempt.day:
            folder = self._folder(job, attempt.key)
            self._cache(job).put("artifacts", attempt.key, attempt.record, folder)

    def _artifact(self, job: Job, attempt: Attempt, folder: Path) -> Artifact | None:
        """The artifact of ``attempt``: of this build, or of the cache with its files in ``folder``."""
        if attempt.record is None:
            return None
        own = self._folder(job, attempt.key)
        if own.is_dir():
            return Artifact(own, attempt.record)
        record = self._take(job, attempt.key, folder)
        if record is not None and record.files == attempt.record.files:
            return Artifact(folder, record)
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def _take(self, job: Job, key: str, folder: Path) -> Record | None:
        """The record of the artifact with ``key`` if the cache has it, with its files in ``folder``."""
        cache = self._cache(job)
        return cache.get("artifacts", key, Record, folder, lambda record: _fits(job, record))

    def _folder(self, job: Job, key: str) -> Path:
        # In one folder: making each takes longer than hashing.
        return self.staging / "attempts" / value_sha256([job.folder, key])

    def _from_cache(self, job: Job) -> Built:
        """The latest artifact with the job's settings, whatever is installed."""
        folder = self.staging / PACKAGE / job.folder
        key = None if job.target.has_secrets else self.cache.ref(self._fingerprint(job, {}))
        record = None if key is None else self._take(job, key, folder)
        if key is None or record is None:
            missing = "the cache has no artifact of this model with these settings."
            if job.target.has_secrets:
                missing = "the cache stores nothing that was compiled with a secret."
            raise self._not_cached(job, missing)
        attempt = Attempt(record.recipe, key, record, day=_today())
        if problems := _low_coverage(job, attempt):
            raise BuildError(*problems)
        artifact = Artifact(folder, record)
        stored = self._stored(job, record.search, latest=True)
        search = self._validated(job, stored, attempt, artifact)
        winner = search.attempts[-1]
        if winner.differences:
            raise BuildError(*winner.differences)
        return self._built(job, search, winner, artifact)

    def _built(self, job: Job, search: Search, winner: Attempt, artifact: Artifact) -> Built:
        """The result, with what else was tried; raises BuildError if more must be known of it."""
        form = winner.recipe.form_of(job)
        for model in form.models:
            check_conclusive(form, model, winner.validations[model.name])
        win = search.won_by(winner).winners[search.terms]
        preparations = (
            replace(done, failed=win.failed, tried=tuple(dict.fromkeys((*done.tried, *win.tried))))
            for done in artifact.record.preparations
        )
        record = replace(artifact.record, preparations=tuple(preparations))
        return Built(
            form, replace(artifact, record=record), winner.validations, cached=bool(winner.day)
        )

    def _validated(
        self, job: Job, search: Search, attempt: Attempt, artifact: Artifact | None = None
    ) -> Search:
        """The search with ``attempt`` and its validations. Without its ``artifact`` none is run for them."""
        record, form = attempt.record, attempt.recipe.form_of(job)
        if record is None:
            return search.adding(attempt)
        stored, validations = dict(search.validations), dict[str, Validation]()
        for model, context in zip(form.models, record.contexts, strict=True):
            key = validation_key(form, model, record, self.index)
            validation = self._without_run(form, model, stored.get(key))
            if validation is None and artifact is None:
                return search.adding(replace(attempt, validations={}))
            if validation is None and job.needs_device:
                validation = self._validation_alone(job, model)
            elif validation is None and artifact is not None:
                validation = stored[key] = self._run(form, model, artifact, context)
            assert validation is not None
            validations[model.name] = validation
            if validation.differs:
                break
        return replace(search, validations=stored).adding(replace(attempt, validations=validations))

    def _without_run(self, job: Job, model: Model, stored: Validation | None) -> Validation | None:
        """The validation of ``model`` without a run: the ``stored`` one, or if it is not to be run here."""
        from_cache = job.target.from_cache
        # What cannot be opened is run alone: the cache may have that.
        is_elsewhere = from_cache and job.needs_device
        reason = None if is_elsewhere else reason_not_to_run(job)
        not_run = validation_without_run(job, model, reason)
        # If it was not run, the EP's device may be here now.
        is_run = stored and not not_run and stored.status is ValidationStatus.RAN
        return stored if stored and (from_cache or is_run) else not_run

    def _run(self, job: Job, model: Model, artifact: Artifact, context: Context) -> Validation:
        """Validate a model of ``artifact``; raises BuildError if it must be run and was not."""
        if job.target.from_cache:
            reason = (
                "the artifact in the cache was not validated with these inputs, this tolerance and these "
                "options."
            )
            raise self._not_cached(job, reason, step="validation")
        with self._unchanged(job):
            validation = self.steps.validate(job, model, artifact, context)
        is_run = validation.differs or validation.status is ValidationStatus.RAN
        if not is_run and model.validate.mode == "require":
            raise not_run_error(job, model, validation.reason or "it was not run")
        return validation

    def _validation_alone(self, job: Job, model: Model) -> Validation:
        """The validation of a model that was compiled alone, and once, for each chip."""
        validations = []
        for alone in job.alone:
            if alone.models == (model,):
                if alone.folder not in self._built_alone:
                    self._built_alone[alone.folder] = self.run(alone)
                validations.append(self._built_alone[alone.folder].validations[model.name])
        return validation_of_alone(job, model, validations)

    @contextlib.contextmanager
    def _unchanged(self, job: Job) -> Iterator[None]:
        """Raise ModelError at the end if a file that the job reads has changed since the build hashed it."""
        files, error = self._files(job), None
        try:
            yield
        except BuildError as raised:
            # A file that has changed in the meantime may be the cause.
            error = raised
        for file in files:
            self.index.check(file)
        if error is not None:
            raise error
        if added := set(self._files(job)).difference(files):
            raise changed_error(min(added))

    def _files(self, job: Job) -> list[Path]:
        """All files that compiling and validating the job read."""
        inputs = [job.target.calibration, *(model.validate.inputs for model in job.models)]
        sources = [file for model in job.models for file in self.sources[model.name].files]
        return [
            *sources,
            *(file for folder in filter(None, inputs) for file in input_files(folder)),
        ]

    def _waiting(self, job: Job) -> Callable[[], None]:
        beat = Heartbeat()
        line = f"{job.location}: waiting for another job or build, which compiles the same"
        printed: list[str] = []

        def wait() -> None:
            if self.steps.stopped:
                raise interrupted()
            if not printed:
                printed.append(line)
                self.log(line)
            elif beat.due():
                self.log(f"{line}, for {beat.seconds:.0f} s")

        return wait

    def _not_cached(self, job: Job, reason: str, step: str = "") -> BuildError:
        """The error of a job that only reads the cache."""
        message = f"{PREFIX}FROM_CACHE allows this target only from the cache, and {reason}"
        hint = (
            "Build it on a machine that can compile it: "
            f"{PREFIX}TARGETS={job.target.name}, with the same cache."
        )
        if job.target.has_secrets:
            hint = "Compile the target in the build of the wheel."
        message += self.cache.trouble
        return BuildError(Problem(Kind.NOT_CACHED, "", message, hint, step=step))

    def _cache(self, job: Job) -> Cache:
        """The cache for ``job``. A job with a secret uses none: a key would have to depend on the secret, and
        its hash could be guessed.
        """
        return Cache(None, self.log) if job.target.has_secrets else self.cache

    def _fingerprint(self, job: Job, versions: Mapping[str, str]) -> str:
        sha256 = {name: source.sha256 for name, source in self.sources.items()}
        inputs = job.target.calibration
        calibration = inputs_digest(inputs, self.index) if inputs else ""
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


def failure(job: Job, tried: Sequence[Attempt], tried_now: Container[str] = ()) -> BuildError:
    """Why no attempt that was ``tried`` wins: the disagreement nearest to the limits, the nodes that are left
    to the CPU, or the EP's refusal, in that order. ``tried_now``: the keys of the attempts of this build.
    """
    compiled = [attempt for attempt in tried if attempt.record is not None]
    if differing := [attempt for attempt in compiled if attempt.differences]:
        cause = max(differing, key=lambda a: a.verdict.margin if a.verdict else 0.0)
        problems = cause.differences
    elif covering := [attempt for attempt in compiled if attempt.may_ship]:
        # The best of all forms: it leaves the user least to solve.
        cause = max(covering, key=lambda a: a.share)
        problems = _low_coverage(job, cause)
    else:
        # Without dynamic quantization, if that was undone; or of the last simplifier, if none works.
        refused = [attempt for attempt in tried if attempt.stopped_in == "compile"]
        refused.sort(key=lambda attempt: not attempt.recipe.dequantize)
        cause = (refused or tried[-1:])[0]
        problems = _refusal(job, cause)
    first, *others = (_with_own_keys(job, problem) for problem in problems)
    if cause.day and cause.key not in tried_now:
        again = f"An earlier build tried this ({cause.day}); {PREFIX}NO_CACHE=1 tries it again."
        first = replace(first, message=f"{first.message}\n{again}")
    return BuildError(replace(first, tried=notes(tried, cause)), *others)


def _with_own_keys(job: Job, problem: Problem) -> Problem:
    """``problem``, which may come from a build of another project, with the keys of this one."""

    def own(key: Key) -> Key:
        kind, *rest = key.parts or ("",)
        if kind == "targets":
            return Key(("targets", job.target.name, *rest[1:]))
        if kind != "models" or any(
            model.key.contains(key) and model.key.model == key.model for model in job.models
        ):
            return key
        model = job.models[0].key
        return replace(model, parts=(*model.parts, *rest[1:]))

    settings = (replace(setting, key=own(setting.key)) for setting in problem.settings)
    return replace(problem, settings=tuple(settings))


def _low_coverage(job: Job, attempt: Attempt) -> tuple[Problem, ...]:
    """The problem of the first model of which less was compiled than the job's target requires."""
    form, contexts = attempt.recipe.form_of(job), attempt.record.contexts if attempt.record else ()
    problems = (
        low_coverage(context.coverage, form.target, model)
        for model, context in zip(form.models, contexts, strict=True)
    )
    return tuple(filter(None, problems))[:1]


def _refusal(job: Job, attempt: Attempt) -> tuple[Problem, ...]:
    """The EP's problems with ``attempt``, or those of the last simplifier, if none works."""
    first, *others = attempt.refused.problems if attempt.refused else ()
    has_sizes = all(model.dims or model.shapes for model in job.models)
    if attempt.stopped_in == "compile" and has_sizes and not job.target.settings.static_shapes:
        # Only the user knows whether the model may have fixed sizes.
        cause = (
            "The target leaves dimensions open; the EP may compile the model with the configured sizes (not "
            "tried):"
        )
        fixed = Setting(job.target.key / "static-shapes", True)
        settings = (*first.settings, fixed)
        first = replace(first, causes=(*first.causes, cause), settings=settings)
    return first, *others


def _fits(job: Job, record: Record) -> bool:
    """Whether ``record`` may be that of an artifact of ``job``."""
    is_same = [context.model for context in record.contexts] == [model.name for model in job.models]
    return is_same and record.product == job.target.provider.product


def _key(fingerprint: str, recipe: Recipe) -> str:
    """The key of an attempt."""
    return value_sha256([fingerprint, to_plain(recipe)])


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()

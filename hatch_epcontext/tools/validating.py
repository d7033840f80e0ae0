"""Validates an artifact of any tool, or a model package of ours: the files, and the outputs.

A package may be of somebody else: what its manifest names is opened only if it is in the package.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.genai_config import read_config
from hatch_epcontext.config.paths import is_genai_folder
from hatch_epcontext.config.settings import CompileSettings, Model, Target
from hatch_epcontext.config.tables import ValidationMode
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    InspectionError,
    Key,
    Kind,
    ModelError,
    Problem,
    RequirementError,
    Setting,
    UnavailableError,
)
from hatch_epcontext.files import FileRecord, link_or_copy, temp_dir
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.artifact import Source
from hatch_epcontext.jobs.boards import BoardEntry, BoardRun
from hatch_epcontext.jobs.job import reason_not_to_run
from hatch_epcontext.jobs.plan import Job, jobs_of, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.jobs.sources import cut_models, unknown_outputs
from hatch_epcontext.jobs.steps import validate_moved
from hatch_epcontext.package.folder import damaged_files
from hatch_epcontext.package.manifest import FILE, Component, ModelPackage, Variant
from hatch_epcontext.providers import PROVIDERS, Provider, find
from hatch_epcontext.shipped import CPU_EP, OPTION_FILE, OPTION_FILES, SOURCE
from hatch_epcontext.text import listing, show, suggestion
from hatch_epcontext.tools.boards import RUNS, Board, BoardDevice
from hatch_epcontext.tools.configure import configure, name_models, nested
from hatch_epcontext.tools.inspecting import inspect, inspect_model, verify_model
from hatch_epcontext.worker.requests import (
    InspectReply,
    PrepareRequest,
    TimeOpeningRequest,
    ValidateRequest,
)
from hatch_epcontext.worker.results import Context, Validated, Validation, ValidationStatus

_REQUIRED = {"validate.mode": "require"}
"""The mode of a validation that a user asks for: what cannot be run is an error."""

_RUN = ("require", "auto")
"""The modes of a validation that runs the model."""

_SMALL = 2**20
"""The most bytes of a context model whose blobs are in sidecars."""

_PATH_OPTIONS = frozenset(
    {"ep.context_file_path", "session.model_external_initializers_file_folder_path"}
)
"""Session options that name a file of the package."""

_OUTPUT_OPTIONS = frozenset(
    {
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.enable_profiling",
        "session.optimized_model_filepath",
    }
)
"""Session options that name a file to write: ONNX Runtime rejects a package with one."""

_ELSEWHERE = re.compile(r"(?:^|[\"'])(?:[/\\]|[A-Za-z]:[/\\])|(?:^|[/\\])\.\.(?:[/\\]|$)")
"""What an absolute path and a parent folder have, also in JSON."""


@dataclass(frozen=True)
class ValidatedContext:
    """A validated artifact.

    ``provider``, ``ep``: those that it was validated for.
    ``model``: the facts of its file.
    ``validation``: its status, and how near its outputs are to the CPU's.
    """

    path: str
    provider: str
    ep: str
    model: InspectReply
    validation: Validation


@dataclass(frozen=True)
class ValidatedVariant:
    """A variant of a component: the facts of its file, and its validation.

    Both are None if it failed, or was not run although that was required; ``problems`` are why. ``entry``:
    what a report of this machine has of it; None without a report, and of the source. ``run``: as in that.
    """

    component: str
    variant: str
    ep: str
    model: InspectReply | None = None
    validation: Validation | None = None
    problems: tuple[Problem, ...] = ()
    run: BoardRun | None = None
    entry: BoardEntry | None = None

    @property
    def name(self) -> str:
        """The component and the variant in a message: ``"digits -> x-elite"``."""
        return f"{self.component} -> {self.variant}"


def validate_context(
    context: Path,
    provider: str | None,
    source: Path | None,
    settings: Mapping[str, Any],
    make_workers: Callable[[float], Workers],
) -> ValidatedContext:
    """Validate the artifact at ``context``, as `hatch_epcontext.api.validate_context` describes.

    ``make_workers`` gets the timeout in seconds.
    """
    model = inspect_model(context)
    verify_model(context, model)
    known = _provider_of(context, model, provider)
    (name,) = name_models([context])
    config = configure({name: source or context}, known.name, nested(_REQUIRED, settings))
    planned = plan(config.on_this_machine)
    if len(planned.config.models) > 1:
        key = Key() / next(model.listed for model in planned.config.models if model.listed)
        message = "has several shapes, and an artifact has only one."
        raise ConfigError(
            Problem.at(key, Kind.NOT_APPLICABLE, message, "Keep the one that it has.")
        )
    (job,) = planned.jobs
    _check_chip(context, model, job.target.provider, job.target.settings)
    mode = job.models[0].validate.mode

    def run() -> _Ran:
        if mode not in _RUN:
            return _Ran(Validation(ValidationStatus.STRUCTURE))
        check_environment(planned.config.targets, planned.requirements)
        workers = make_workers(planned.config.build.timeout)
        if source is None:
            return _run(context, model, job, workers, compare=False)
        with temp_dir() as staging:
            cache = Cache(None, lambda line: None)
            (cut,) = jobs_of(cut_models(planned.config, cache, workers, staging))
            return _run(context, model, cut, workers, compare=True)

    validation = _unless_unavailable(mode, run, str(context)).validation
    return ValidatedContext(str(context), known.name, known.ep, model, validation)


@dataclass(frozen=True)
class _Ran:
    """How an artifact was validated, and what a report of this machine says of that."""

    validation: Validation
    run: BoardRun | None = None


def _unless_unavailable(mode: ValidationMode, run: Callable[[], _Ran], location: str) -> _Ran:
    """What ``run`` returns; or, unless the ``mode`` requires it, why this machine cannot run the artifact."""
    try:
        ran = run()
    except (RequirementError, UnavailableError) as error:
        if mode == "require":
            raise
        reason = error.problems[0].message.splitlines()[0].rstrip(".")
        return _Ran(Validation(ValidationStatus.STRUCTURE, reason=reason))
    if mode == "require" and ran.validation.status is not ValidationStatus.RAN:
        raise _not_run(f"it was run on the CPU only: {ran.validation.reason}", location)
    return ran


def _not_run(reason: str, location: str = "") -> UnavailableError:
    """The error for an artifact that does not run on its EP here."""
    message, hint = (
        f"{reason}.",
        "Validate it on a machine that can run it, or allow that it is not run.",
    )
    how = Setting(Key() / "validate", "auto")
    return UnavailableError(Problem(Kind.NOT_RUN, location, message, hint, settings=(how,)))


def _provider_of(path: Path, model: InspectReply, named: str | None) -> Provider:
    """The provider that compiled the artifact; ``named``: the user's choice, if any.

    Raises ConfigError when ``named`` is unknown, and InspectionError when another provider, or an unknown
    one, compiled the artifact.
    """
    sources = list(dict.fromkeys(context.source for context in model.contexts))
    provider = find(named if named is not None else next(iter(sources), ""))
    if named is not None and provider is None:
        message = f"{show(named)} is not a known provider."
        hint = suggestion(named, PROVIDERS)
        raise ConfigError(Problem.at(Key() / "provider", Kind.UNKNOWN_PROVIDER, message, hint))
    if provider is not None:
        if sources and provider.needs_library:
            return provider.changed(ep=sources[0])
        if all(map(provider.reads, sources)) if sources else provider.product == "optimized":
            return provider
    kind = f"contexts of {listing(map(repr, sources))}" if sources else "no EPContext node"
    message = f"has {kind}, and is not of {provider.ep if provider else 'a known provider'}."
    hint = (
        "Name the provider of an optimized graph, or plugin, with its library, for an unknown EP."
    )
    raise InspectionError(Problem(Kind.WRONG_PROVIDER, str(path), message, hint))


def _check_chip(
    path: Path, model: InspectReply, provider: Provider, settings: CompileSettings
) -> None:
    """Raise InspectionError when ``model`` was compiled for another chip than ``settings`` name."""
    compatibility = model.compatibility.get(provider.ep, "")
    versions = (context.ep_sdk_version for context in model.contexts)
    problems = [
        Problem(
            Kind.WRONG_PROVIDER,
            str(path),
            f"was not compiled for these options: {disagreement}.\n"
            f"Its compatibility string is {compatibility or 'missing'}.",
        )
        for disagreement in provider.disagreements(
            compatibility, versions, settings.provider_options
        )
    ]
    InspectionError.check(problems)


def _reason_not_to_open(path: Path, model: InspectReply, provider: Provider) -> str | None:
    """Why the context cannot be opened here: it is for several chips, or shares its sidecar with another."""
    chip = provider.compiled_for(model.compatibility.get(provider.ep, ""))
    if provider.several_chips and len(provider.per_chip(chip)) > 1:
        return (
            f"it is for several chips ({provider.describe(chip)}), and {provider.ep} cannot open such "
            "contexts on this machine"
        )
    if not provider.shares_weights or provider.loads_shared:
        return None
    others = [
        other
        for other in path.parent.glob("*.onnx")
        if other.name != path.name and other.stat().st_size < _SMALL
    ]
    for sidecar in {context.sidecar for context in model.contexts if context.sidecar}:
        for other in others:
            if sidecar.encode() in other.read_bytes():
                return (
                    f"it shares {sidecar} with {other.name}, and {provider.ep} cannot open contexts "
                    "that share weights on this machine"
                )
    return None


def _run(path: Path, model: InspectReply, job: Job, workers: Workers, *, compare: bool) -> _Ran:
    """Run the artifact, and ``compare`` it with the job's model, which is otherwise the artifact itself."""
    (configured,) = job.models
    ModelError.check(unknown_outputs(configured, model.outputs))
    to_run = configured.to_run_on(job.target)
    # The source gets the shapes of the compiled model.
    to_run = replace(to_run, shapes={**_fixed_shapes(model.inputs), **to_run.shapes})
    artifact = _Artifact(path, model, str(path))
    return _run_moved(artifact, to_run, job.target, workers, None, compare=compare)


@dataclass(frozen=True)
class _Artifact:
    """The artifact at ``path`` with its facts; messages say ``location``. A variant has a ``folder``."""

    path: Path
    facts: InspectReply
    location: str
    folder: Path | None = None


def _run_moved(
    artifact: _Artifact,
    to_run: Model,
    target: Target,
    workers: Workers,
    device: BoardDevice | None,
    *,
    compare: bool,
) -> _Ran:
    """Run the artifact on ``target``, from a moved copy of its files, or of its folder.

    ``to_run``: the source to ``compare`` with, or the artifact itself. On the ``device`` of a board a
    difference is a result, and it may open what a simulator does not. Raises UnavailableError if it cannot be
    run here, and BuildError if it fails.
    """
    provider, facts, location = target.provider, artifact.facts, artifact.location
    if (device is None or device.simulated) and (
        reason := reason_not_to_run(provider) or _reason_not_to_open(artifact.path, facts, provider)
    ):
        raise _not_run(reason, location)
    tolerance = to_run.tolerance_for(target) if compare else None
    with temp_dir() as staging:
        moved = staging / "moved"
        name = _copy(artifact, moved)
        context = Context(to_run.name, name, facts.inputs, facts.outputs)
        request = ValidateRequest(to_run, target, context, str(moved), tolerance)

        numbers = itertools.count()

        def call(request: ValidateRequest) -> Validated:
            return workers.call(request, staging / str(next(numbers)), location=location)

        source = PrepareRequest(
            to_run,
            "none",
            str(staging / "source"),
            tolerance is not None,
            dequantize=target.settings.dequantize,
            tolerance=tolerance if target.settings.changes_precision else None,
            emulated=False,
        )
        # The call makes both folders.
        prepare = partial(workers.call, source, staging / "source" / "call", location=location)
        validated = validate_moved(request, call, prepare) if compare else call(request)
        validation = validated.validation
        if validation.differs and device is None:
            raise BuildError(*validation.problems).located(location)
        if not compare and validation.reason is None:
            validation = replace(validation, reason="there is no source to compare with")
        if device is None or validation.status is not ValidationStatus.RAN:
            return _Ran(validation)
        timing = None
        if not (validation.differs or validation.simulated):
            # As it is compiled, and from its file.
            how = str(moved / name), target, True, False
            to_time = TimeOpeningRequest(*how, to_run, facts.inputs, {}, RUNS)
            timing = workers.call(to_time, staging / "timing", location=location)
        compatibility = facts.compatibility.get(provider.ep, "")
        return _Ran(validation, device.run(target, compatibility, validation, timing))


def _copy(artifact: _Artifact, moved: Path) -> str:
    """Put the ONNX file and all files that it names into ``moved``; returns its path there.

    A context model in a folder of its own gets all files of that: an EP may look for some that no node
    names.
    """
    path, model, folder = artifact.path, artifact.facts, artifact.folder
    if folder is not None and model.contexts:
        # What a link names, because the copy is elsewhere.
        shutil.copytree(
            folder, moved, copy_function=lambda a, b: link_or_copy(Path(a).resolve(), b)
        )
        return path.relative_to(folder).as_posix()
    names = [path.name, *model.external_data]
    names += [context.sidecar for context in model.contexts if context.sidecar]
    for name in dict.fromkeys(names):
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy((path.parent / name).resolve(), moved / name)
    return path.name


def _fixed_shapes(inputs: Iterable[TensorFacts]) -> dict[str, tuple[int, ...]]:
    """The shapes of the ``inputs`` without open dimensions."""
    return {
        tensor.name: tuple(size for size in tensor.sizes if isinstance(size, int))
        for tensor in inputs
        if tensor.is_fixed
    }


@dataclass(frozen=True)
class Reporting:
    """A report of this machine about a package.

    ``package``: what messages call it. ``sources``: models of the project that it was built from, by their
    names, with their samples.
    """

    package: str
    sources: Mapping[str, Source] = field(default_factory=dict)

    def source_of(self, name: str, component: Component) -> Model | None:
        """The source of ``component`` in the project; raises InspectionError if it is another model now."""
        source = self.sources.get(name)
        if source is not None and source.identity != component.about.identity:
            message = f"the project has another model {name!r} than the package."
            hint = "Name the sdist that the wheel was built from."
            raise InspectionError(Problem(Kind.CHANGED_FILE, self.package, message, hint))
        return source.model if source else None


def validate_package(
    path: Path,
    settings: Mapping[str, Any],
    make_workers: Callable[[float], Workers],
    reporting: Reporting | None = None,
) -> Iterator[ValidatedVariant]:
    """Validate the model package in the folder ``path``, and yield each variant when it is finished.

    Each variant is opened and run in a process of its own, from a copy of its files in another folder, and
    compared with the package's own source model, or else its first variant for the CPU. ``make_workers`` gets
    the timeout in seconds.

    When ``reporting`` each has an entry: what cannot be run here, or differs, is a result, what a device runs
    is timed, and ``device = "any"`` of the ``settings`` accepts simulators.

    Raises InspectionError with all errors of the manifest, or with all files that are damaged; ConfigError
    for settings that only a single context model takes; and RequirementError when ONNX Runtime is not
    installed.
    """
    settings = nested(_REQUIRED if reporting is None else {"validate.mode": "auto"}, settings)
    any_device = reporting is not None and settings.get("device") == "any"
    _check_settings(settings, reporting)
    package = _read(path)
    InspectionError.check(damaged_files(path, package))
    # Any file will do for the path: the model itself is not read here.
    config = configure({"model": path / FILE}, "cpu", settings)
    (model,) = config.models
    ConfigError.check(_unknown_sizes(model, package.components.values()))
    if model.validate.mode in _RUN:
        check_environment((), INSPECTION)
    named = {name: getattr(model.validate, name) for name in settings["validate"]}
    with make_workers(config.build.timeout) as workers:
        board = Board(workers, any_device=any_device) if reporting else None
        location = reporting.package if reporting else str(path)
        variants = _Variants(package, path, workers, board, location)
        for name, component in package.components.items():
            source = reporting.source_of(name, component) if reporting else None
            own = _model_for(component, model, named, source)
            for target in component.variants:
                if reporting and target == SOURCE:
                    continue
                result = variants.validate(name, target, own, source.path if source else None)
                if reporting:
                    entry = _entry(package, result, reporting.sources.get(name))
                    result = replace(result, entry=entry)
                yield result


def _model_for(
    component: Component, model: Model, named: Mapping[str, Any], source: Model | None
) -> Model:
    """``model`` with the sizes and the validation of ``component``, the samples of the project's ``source``,
    and before all these what the user has set, in a validation those that are ``named``.
    """
    validate = component.about.validate
    if source is not None:
        validate = replace(validate, inputs=source.validate.inputs)
    return replace(
        model,
        dims={**component.about.dims, **model.dims},
        shapes={**component.about.fed, **model.shapes},
        validate=replace(validate, **named),
    )


def _check_settings(settings: dict[str, Any], reporting: Reporting | None) -> None:
    """Raise ConfigError for settings that a package has itself; leaves out the device of a report."""
    allowed = {"validate", "build", "dims", "shapes"}
    if reporting is not None and settings.get("device") == "any":
        del settings["device"]
    message = "is for a single context model: the variants of a model package have their own."
    problems = [
        Problem.at(Key() / name, Kind.NOT_APPLICABLE, message)
        for name in sorted(settings.keys() - allowed)
    ]
    if reporting is not None and "tolerance" in settings["validate"]:
        message = "is not for a report, which has the limits of the project."
        problems.append(Problem.at(Key() / "validate" / "tolerance", Kind.NOT_APPLICABLE, message))
    ConfigError.check(problems)


def _entry(package: ModelPackage, result: ValidatedVariant, source: Source | None) -> BoardEntry:
    """What a report of this machine has of ``result``, a variant of ``package``.

    ``source``: the project's own, if it was compared with that.
    """
    component = package.components[result.component]
    variant, reference = component.variants[result.variant], _reference(component, result.variant)
    compared_with = _files_in(package, reference) if reference else {}
    reason = result.validation.reason if result.validation and result.run is None else None
    if result.problems:
        reason = result.problems[0].message.splitlines()[0]
    return BoardEntry(
        result.component,
        result.variant,
        result.ep,
        component.about.identity,
        _files_in(package, variant),
        result.run,
        source.records if source else compared_with,
        reason or "",
    )


def _files_in(package: ModelPackage, variant: Variant) -> dict[str, FileRecord]:
    """The files in the folder of ``variant``, by their path in it."""
    folder = PurePosixPath(variant.variant_directory)
    return {
        PurePosixPath(name).relative_to(folder).as_posix(): record
        for name, record in package.files.items()
        if PurePosixPath(name).is_relative_to(folder)
    }


def _unknown_sizes(model: Model, components: Iterable[Component]) -> Iterator[Problem]:
    """Problems for dims and shapes of ``model`` that are of none of the ``components``."""
    tensors = [tensor for component in components for tensor in component.about.inputs]
    dims = {size for tensor in tensors for size in tensor.sizes if isinstance(size, str)}
    for key, names, known in (
        ("dims", model.dims, dims),
        ("shapes", model.shapes, {tensor.name for tensor in tensors}),
    ):
        for name in names:
            if name not in known:
                noun = "open dimension" if key == "dims" else "input"
                message, hint = f"no model has the {noun} {name!r}.", suggestion(name, known)
                yield Problem.at(Key() / key / name, Kind.UNKNOWN_INPUT, message, hint)


def _sized(inputs: Iterable[TensorFacts], model: Model) -> Iterator[TensorFacts]:
    """The ``inputs`` with the sizes that ``model`` has for them, and 1 for their other open dimensions."""
    for tensor in inputs:
        if tensor.name in model.shapes:
            yield replace(tensor, shape=model.shapes[tensor.name])
        elif not model.dims.keys().isdisjoint(tensor.sizes):
            sizes = (model.dims.get(str(size), size) for size in tensor.sizes)
            shape = tuple(size if isinstance(size, int) else 1 for size in sizes)
            yield replace(tensor, shape=shape)


def _read(folder: Path) -> ModelPackage:
    package = inspect(folder).packages.get(".")
    if package is None:
        message, hint = "has no manifest itself.", "Name the folder of one model package."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(folder), message, hint))
    if not package.variants:
        names = ", ".join(package.about.companions)
        message = f"has no variants{f': they are in {names}' if names else ''}."
        raise InspectionError(Problem(Kind.INVALID_PACKAGE, str(folder), message))
    return package


@dataclass(frozen=True)
class _Variants:
    """The variants of a ``package`` in ``folder``, which ``workers`` open; for a report on the ``board``.

    Problems are at the names of variants after ``location``.
    """

    package: ModelPackage
    folder: Path
    workers: Workers
    board: Board | None
    location: str

    def validate(
        self, component: str, variant: str, model: Model, source: Path | None
    ) -> ValidatedVariant:
        """What validating a variant says. ``model`` has the settings of the validation; ``source``: the
        project's own, if that is known.
        """
        ep = self.package.components[component].variants[variant].ep
        result = ValidatedVariant(component, variant, ep)
        location = f"{self.location}: {result.name}"
        try:
            return self._validate(result, model, source, location)
        except EpcontextError as error:
            # The key of a problem is one that no user wrote.
            problems = (
                replace(problem, key=None, location=location)
                if problem.key or not problem.location
                else problem
                for problem in error.problems
            )
            return replace(result, problems=tuple(problems))

    def _validate(
        self, result: ValidatedVariant, model: Model, source: Path | None, location: str
    ) -> ValidatedVariant:
        """``result``, validated; raises EpcontextError for all that is wrong with the variant."""
        variant = self.package.components[result.component].variants[result.variant]
        file = self.folder / variant.model_file
        facts = inspect_model(file, self.workers)
        verify_model(file, facts)
        artifact = _Artifact(file, facts, location, self.folder / variant.variant_directory)
        run = partial(self._run, result, artifact, model, source)
        ran = _unless_unavailable(model.validate.mode, run, location)
        result = replace(result, model=facts, run=ran.run)
        if ran.validation.differs:
            error = BuildError(*ran.validation.problems).located(location)
            return replace(result, problems=error.problems)
        return replace(result, validation=ran.validation)

    def _run(
        self, result: ValidatedVariant, artifact: _Artifact, model: Model, source: Path | None
    ) -> _Ran:
        """Run the ``artifact`` of a variant, and compare it with the ``source``, or another variant."""
        component = self.package.components[result.component]
        variant = component.variants[result.variant]
        target = _target(variant, result.variant, artifact.path, artifact.facts)
        if model.validate.mode not in _RUN:
            return _Ran(Validation(ValidationStatus.STRUCTURE))
        device = self.board.device(target) if self.board else None
        needs_device = variant.about is not None and variant.about.needs_device
        if needs_device and (device is None or device.simulated):
            reason = f"only the device itself can open it, and no simulator of {variant.ep}"
            raise _not_run(reason, artifact.location)
        reference = _reference(component, result.variant)
        own = reference or variant
        to_run = replace(
            model,
            name=result.component,
            path=source or (self.folder / own.model_file).absolute(),
            targets=(),
            static_shapes=True,
            dims={},
            shapes=self._shapes(component, own, artifact.facts.inputs, model),
        )
        compare = source is not None or reference is not None
        return _run_moved(artifact, to_run, target, self.workers, device, compare=compare)

    def _shapes(
        self, component: Component, source: Variant, inputs: Sequence[TensorFacts], model: Model
    ) -> dict[str, tuple[int, ...]]:
        """The shapes in which ``source`` runs; those of the variant's ``inputs`` count most."""
        names = {tensor.name for tensor in inputs}
        configured = (tensor for tensor in component.about.inputs if tensor.name in names)
        files = self.folder / source.variant_directory
        return {
            **(read_config(files).dummy_shapes if is_genai_folder(files) else {}),
            **_fixed_shapes(_sized(inputs, model)),
            **_fixed_shapes(configured),
            **_fixed_shapes(inputs),
        }


def _reference(component: Component, name: str) -> Variant | None:
    """The variant to compare another one with: the source, or one for the CPU. None if it is that itself."""
    variants = component.variants
    on_cpu = (known for known, variant in variants.items() if variant.ep == CPU_EP)
    reference = SOURCE if SOURCE in variants else next(on_cpu, name)
    return variants[reference] if reference != name else None


def _target(variant: Variant, name: str, file: Path, model: InspectReply) -> Target:
    """What the variant ``variant`` is opened for.

    Raises InspectionError when its manifest and its file disagree, and BuildError when nothing is known
    of its EP, or when it names files elsewhere.
    """
    about, ort = variant.about, variant.ort
    # The source is for the CPU.
    settings = about.settings if about else CompileSettings(provider="cpu", ep=CPU_EP, device="cpu")
    if settings.provider not in PROVIDERS:
        raise _not_run(f"{settings.provider} is not a known provider")
    settings = replace(
        settings, session_options={**settings.session_options, **ort.session_options}
    )
    load_options = {**ort.provider_options, **(about.load_options if about else {})}
    target = Target(name, settings, about.plugin if about else None, load_options)
    _check_contexts(variant, target.provider, file, model)
    if reason := next(_outside_of_package(target), None):
        raise _not_run(reason)
    _check_chip(file, model, target.provider, settings)
    shipped = str(file.parent / OPTION_FILES)
    load_options = {
        name: value.replace(OPTION_FILE, shipped) for name, value in load_options.items()
    }
    return replace(target, load_options=load_options)


def _outside_of_package(target: Target) -> Iterator[str]:
    """What is missing, and what an app may do but a package of somebody else may not: names files elsewhere,
    or read the environment of who validates it.
    """
    settings, plugin, ep = target.settings, target.plugin, target.settings.ep
    if plugin and plugin.path:
        yield f"it names a library elsewhere: {plugin.path}"
    if target.provider.needs_library and not (plugin and plugin.module):
        yield f"no package contains the library of {ep}"
    if named := sorted(_PATH_OPTIONS & settings.session_options.keys()):
        yield f"its session option {named[0]} names files elsewhere"
    provider_options = {**settings.provider_options, **target.load_options}
    for name, value in (*provider_options.items(), *settings.session_options.items()):
        if name in _OUTPUT_OPTIONS or _ELSEWHERE.search(value):
            yield f"its option {name} names a file elsewhere: {value!r}"


def _check_contexts(variant: Variant, provider: Provider, file: Path, model: InspectReply) -> None:
    """Raise InspectionError if the model's contexts are not those that the manifest names."""
    message, ep = "", variant.ep
    written, named = model.compatibility.get(ep), variant.compatibility_string
    sources = dict.fromkeys(context.source for context in model.contexts)
    # The manifest may name another EP than the settings in it.
    if others := [name for name in sources if ep != provider.ep or not provider.reads(name)]:
        message = f"has contexts of {listing(map(repr, others))}, and the manifest says {ep}."
    elif written and named and written != named:
        message = (
            f"has the compatibility string {written}, and the manifest says {named}:\n"
            "it was compiled for something else."
        )
    if message:
        raise InspectionError(Problem(Kind.WRONG_PROVIDER, str(file), message))

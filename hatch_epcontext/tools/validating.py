"""Validates an artifact of any tool: its files, and its outputs."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from hatch_epcontext.files import link_or_copy, temp_dir
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.cache.store import Cache
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import check_environment
from hatch_epcontext.jobs.sources import cut_plan, unknown_outputs
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.providers import PROVIDERS, Provider, Tolerance, find
from hatch_epcontext.text import listing, pairs, show, suggestion
from hatch_epcontext.tools.configure import configure, name_models, nested
from hatch_epcontext.tools.inspecting import inspect_model, verify_model
from hatch_epcontext.worker.requests import InspectReply, ValidateRequest
from hatch_epcontext.worker.results import Context, Validation, ValidationStatus

REQUIRED = {"validate.mode": "require"}
"""The mode of a validation that a user asks for: what cannot be run is an error."""

_SMALL = 2**20
"""The most bytes of a context model whose blobs are in sidecars."""


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
    if zipfile.is_zipfile(context):
        message = "is an archive, such as a wheel, and not an ONNX file."
        hint = "Install or unpack it, and name the folder of its model package."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(context), message, hint))
    model = inspect_model(context)
    verify_model(context, model)
    known = _provider_of(context, model, provider)
    (name,) = name_models([context])
    config = configure({name: source or context}, known.name, nested(REQUIRED, settings))
    planned = plan(config.on_this_machine)
    if len(planned.config.models) > 1:
        key = Key() / next(m.listed.name for m in planned.config.models if m.listed)
        message = "has several shapes, and an artifact has only one."
        raise ConfigError(
            Problem.at(key, Kind.NOT_APPLICABLE, message, "Keep the one that it has.")
        )
    (job,) = planned.jobs
    check_chip(context, model, job.target.provider, job.target.settings)
    validation = Validation(ValidationStatus.STRUCTURE)
    mode = job.models[0].validate.mode
    if is_run(mode):
        try:
            check_environment(planned.config.targets, planned.requirements)
            workers = make_workers(planned.config.build.timeout)
            with temp_dir() as staging:
                if source is not None:
                    planned = cut_plan(planned, Cache(None, lambda line: None), workers, staging)
                validation = _run(context, model, planned.jobs[0], workers, bool(source))
        except EpcontextError as error:
            if mode == "require" or (reason := reason_not_run(error)) is None:
                raise
            validation = Validation(ValidationStatus.STRUCTURE, reason=reason)
        if mode == "require" and validation.status is not ValidationStatus.RAN:
            raise not_run(f"it was run on the CPU only: {validation.reason}", str(context))
    return ValidatedContext(str(context), known.name, known.ep, model, validation)


def reason_not_run(error: EpcontextError) -> str | None:
    """The reason, if ``error`` only means that this machine lacks the EP or its device."""
    if not isinstance(error, RequirementError | UnavailableError):
        return None
    return error.problems[0].message.splitlines()[0].rstrip(".")


def not_run(reason: str, location: str = "") -> UnavailableError:
    """The error for an artifact that does not run on its EP here."""
    message, hint = (
        f"{reason}.",
        "Validate it on a machine that can run it, or allow that it is not run:",
    )
    how = Setting(Key() / "validate", "auto")
    return UnavailableError(Problem(Kind.NOT_RUN, location, message, hint, settings=(how,)))


def is_run(mode: ValidationMode) -> bool:
    """Whether a validation of this mode runs the model."""
    return mode in ("require", "auto")


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


def check_chip(
    path: Path, model: InspectReply, provider: Provider, settings: CompileSettings
) -> None:
    """Raise InspectionError when ``model`` was compiled for another chip than ``settings`` name."""
    options = {**settings.device_filter, **settings.provider_options}
    compatibility = model.compatibility.get(provider.ep, "")
    versions = (context.ep_sdk_version for context in model.contexts)
    problems = [
        Problem(
            Kind.WRONG_PROVIDER,
            str(path),
            f"was not compiled for these options: {disagreement}.\n"
            f"Its compatibility string is {compatibility or 'missing'}.",
        )
        for disagreement in provider.disagreements(compatibility, versions, options)
    ]
    if problems:
        raise InspectionError(*problems)


def _reason_not_to_open(path: Path, model: InspectReply, provider: Provider) -> str | None:
    """Why the context cannot be opened here: it is for several chips, or shares its sidecar with another."""
    chip = provider.compiled_for(model.compatibility.get(provider.ep, ""))
    if len(provider.chips(chip)) > 1:
        return (
            f"it is for several chips ({pairs(chip)}), and {provider.ep} cannot open such contexts on this "
            "machine"
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


def _run(path: Path, model: InspectReply, job: Job, workers: Workers, compare: bool) -> Validation:
    """Run the artifact, and ``compare`` it with the job's model, which is otherwise the artifact itself."""
    (configured,) = job.models
    if problems := list(unknown_outputs(configured, model.outputs)):
        raise ModelError(*problems)
    to_run = configured.to_run_on(job.target)
    # The source gets the shapes of the compiled model.
    to_run = replace(to_run, shapes={**fixed_shapes(model.inputs), **to_run.shapes})
    tolerance = configured.tolerance_for(job.target) if compare else None
    return run_moved(
        path, model, to_run, job.target, tolerance, workers, str(path), compare=compare
    )


def run_moved(
    path: Path,
    model: InspectReply,
    to_run: Model,
    target: Target,
    tolerance: Tolerance | None,
    workers: Workers,
    location: str,
    *,
    compare: bool,
    folder: Path | None = None,
    sharing: tuple[Context, ...] = (),
) -> Validation:
    """Run the artifact at ``path`` on ``target``, from a moved copy of its files, or of its ``folder``.

    ``to_run``: the source to ``compare`` with, or the artifact itself; ``sharing``: the other members of its
    weight-sharing group. Raises UnavailableError if it cannot be run here, and BuildError if it fails.
    """
    provider = target.provider
    if reason := reason_not_to_run(provider, target.settings) or _reason_not_to_open(
        path, model, provider
    ):
        raise not_run(reason, location)
    with temp_dir() as staging:
        moved = staging / "moved"
        name = _copy(path, model, moved, folder)
        context = Context(to_run.name, name, model.inputs, model.outputs)
        request = ValidateRequest(
            to_run,
            target,
            "context" if model.contexts else "optimized",
            context,
            str(moved),
            tolerance,
            (*sharing, context) if sharing else (),
            has_source=compare,
        )
        validation = workers.call(request, staging / "validate", location=location)
    if validation.differs:
        raise BuildError(*validation.problems).located(location)
    if not compare and validation.reason is None:
        return replace(validation, reason="there is no source to compare with")
    return validation


def _copy(path: Path, model: InspectReply, moved: Path, folder: Path | None) -> str:
    """Put the ONNX file at ``path`` and all files that it names into ``moved``; returns its path there.

    A context model in a ``folder`` of its own gets all files of that: an EP may look for some that no node
    names.
    """
    if folder is not None and model.contexts:
        # What a link names, because its place is another one.
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


def fixed_shapes(inputs: Iterable[TensorFacts]) -> dict[str, tuple[int, ...]]:
    """The shapes of the ``inputs`` without open dimensions."""
    return {
        tensor.name: tuple(size for size in tensor.sizes if isinstance(size, int))
        for tensor in inputs
        if tensor.is_fixed
    }

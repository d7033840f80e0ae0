"""Validates an artifact of any tool: its files, and its outputs."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hatch_epcontext.config.settings import CompileSettings
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
from hatch_epcontext.providers import PROVIDERS, Provider, find
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
                    (job,) = cut_plan(
                        planned, Cache(None, lambda line: None), workers, staging
                    ).jobs
                validation = _run(
                    context, model, job, staging, workers, has_source=source is not None
                )
        except EpcontextError as error:
            reason = reason_not_run(error)
            if reason is None or mode == "require":
                raise
            validation = Validation(ValidationStatus.STRUCTURE, reason=reason)
    return ValidatedContext(str(context), known.name, known.ep, model, validation)


def reason_not_run(error: EpcontextError) -> str | None:
    """The reason, if ``error`` only means that this machine lacks the EP or its device."""
    if not isinstance(error, RequirementError | UnavailableError):
        return None
    return error.problems[0].message.splitlines()[0].rstrip(".")


def is_run(mode: ValidationMode) -> bool:
    """Whether a validation of this mode runs the model."""
    return mode in ("require", "auto")


def _provider_of(path: Path, model: InspectReply, named: str | None) -> Provider:
    """The provider that compiled the artifact; ``named``: the user's choice, if any.

    Raises ConfigError when ``named`` is unknown, and InspectionError when another provider, or an unknown
    one, compiled the artifact.
    """
    sources = list(dict.fromkeys(context.source for context in model.contexts))
    chosen = find(named) if named is not None else None
    if named is not None and chosen is None:
        message = f"{show(named)} is not a known provider."
        hint = suggestion(named, PROVIDERS)
        raise ConfigError(Problem.at(Key() / "provider", Kind.UNKNOWN_PROVIDER, message, hint))
    if chosen is not None and not sources and chosen.product == "optimized":
        return chosen
    if chosen is not None and sources and chosen.needs_library:
        return chosen.changed(ep=sources[0])
    known = chosen or (find(sources[0]) if sources else None)
    contexts = f"has contexts of {listing(map(repr, sources or ['']))}"
    if not sources:
        message = "has no EPContext node: it is not compiled."
        hint = "For an optimized graph name its provider."
    elif known is None:
        message = f"{contexts}, which is not a known provider."
        hint = "Name the provider to load them with: plugin, with its library."
    elif all(map(known.reads, sources)):
        return known
    else:
        message = f"{contexts}, and not of {known.ep} alone."
        hint = "Name another provider, or none: each context names its own."
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


def reason_not_to_open(path: Path, model: InspectReply, provider: Provider) -> str | None:
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


def _run(
    path: Path, model: InspectReply, job: Job, staging: Path, workers: Workers, *, has_source: bool
) -> Validation:
    """Load and run the artifact on the job's target, from a moved copy of all its files.

    With ``has_source`` the job's model is the source to compare with; otherwise it is the artifact
    itself. Raises BuildError when it cannot be run on this machine, or fails.
    """
    to_run = job.models[0].to_run_on(job.target)
    if reason := reason_not_to_run(job.target.provider, job.target.settings) or reason_not_to_open(
        path, model, job.target.provider
    ):
        hint = 'Check only the structure of its files: set validate = "structure".'
        raise UnavailableError(Problem(Kind.NOT_RUN, str(path), f"{reason}.", hint))
    if problems := list(unknown_outputs(job.models[0], model.outputs)):
        raise ModelError(*problems)
    moved = staging / "moved"
    copy_named_files(path, model, moved)
    request = ValidateRequest(
        # The source gets the shapes of the compiled model.
        replace(to_run, shapes={**fixed_shapes(model.inputs), **to_run.shapes})
        if has_source
        else to_run,
        job.target,
        job.target.provider.product,
        Context(to_run.name, path.name, model.inputs, model.outputs),
        str(moved),
        job.models[0].tolerance_for(job.target) if has_source else None,
        has_source=has_source,
    )
    validation = workers.call(request, staging / "validate", location=str(path))
    if validation.differs:
        raise BuildError(*validation.problems).located(str(path))
    if validation.status is not ValidationStatus.RAN:
        how = "not run" if request.product == "context" else "run on the CPU only"
        message = f"it was {how}: {validation.reason}."
        hint = "Validate it on a machine that has its EP."
        raise UnavailableError(Problem(Kind.NOT_RUN, str(path), message, hint))
    return validation if has_source else replace(validation, reason="no source is given")


def copy_named_files(path: Path, model: InspectReply, folder: Path) -> None:
    """Copy the ONNX file at ``path`` and all files that it names into ``folder``, which is made."""
    names = [path.name, *model.external_data]
    names += [context.sidecar for context in model.contexts if context.sidecar]
    for name in dict.fromkeys(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy((path.parent / name).resolve(), folder / name)


def fixed_shapes(inputs: Iterable[TensorFacts]) -> dict[str, tuple[int, ...]]:
    """The shapes of the ``inputs`` without open dimensions."""
    return {
        tensor.name: tuple(size for size in tensor.sizes if isinstance(size, int))
        for tensor in inputs
        if tensor.is_fixed
    }

"""Proof of an artifact that somebody else made: its files, and what it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hatch_epcontext.artifact import Proof, link_or_copy
from hatch_epcontext.errors import BuildError, ConfigError, InspectionError, Problem
from hatch_epcontext.inspection import Inspection, inspect, verify
from hatch_epcontext.plan import Job, model_spec_of, target_spec
from hatch_epcontext.process import Workers
from hatch_epcontext.proof import cannot
from hatch_epcontext.protocol import Context, DescribeReply, ValidateReply, ValidateRequest
from hatch_epcontext.providers import PROVIDERS, Provider, find
from hatch_epcontext.structure import suggestion


def read(path: Path) -> DescribeReply:
    """What the context model, or optimized graph, at ``path`` says of itself, once its files are there.

    Raises InspectionError when it is no ONNX model, or a file that it names is missing or elsewhere.
    """
    found: Inspection = inspect(path)
    if found.model is None:
        raise InspectionError(
            Problem(str(path), "is not an ONNX model.", "Name the context model itself.")
        )
    verify(path, found)
    return found.model


def provider_of(path: Path, model: DescribeReply, wanted: str | None) -> Provider:
    """The provider whose contexts these are; ``wanted`` is what the user says it is.

    Raises ConfigError when that is none, and InspectionError when they are another's or nobody is known
    who made them.
    """
    sources = list(dict.fromkeys(context.source for context in model.contexts))
    given = find(wanted) if wanted is not None else None
    if wanted is not None and given is None:
        what = f"{wanted!r} is not a provider that exists here."
        raise ConfigError(Problem("--provider", what, suggestion(wanted, list(PROVIDERS))))
    if not sources:
        if given is not None and given.product == "optimized":
            return given
        raise InspectionError(
            Problem(
                str(path),
                "has no EPContext node: nothing in it is compiled.",
                "If it is an optimized graph, say for which provider.",
            )
        )
    if given is not None and given.needs_library:
        return replace(given, ep=sources[0])
    found = given or find(sources[0])
    if found is None or sources != [found.ep]:
        raise InspectionError(
            Problem(
                str(path),
                f"its contexts were made by {', '.join(map(repr, sources))}"
                + (f", and not by {found.ep} alone." if found else ", which is not known here."),
                "Name another provider, or none: the contexts say whose they are."
                if found
                else "Name the provider to load them with: plugin, with its library.",
            )
        )
    return found


def check_chip(path: Path, model: DescribeReply, job: Job) -> None:
    """Raise InspectionError when ``model`` was compiled for another chip than the job's options name."""
    provider, target = job.target.provider, job.target
    asked = {**target.device_filter, **target.provider_options}
    compatibility = model.compatibility.get(provider.ep, "")
    versions = (context.ep_sdk_version for context in model.contexts)
    for wrong in provider.disagreements(compatibility, versions, asked):
        raise InspectionError(
            Problem(
                str(path),
                f"was not compiled for what was asked: {wrong}.",
                f"It says of itself: {compatibility}",
            )
        )


SMALL = 2**20
"""Bytes of a context model whose blobs are in sidecars, at most."""


def _cannot_be_opened_alone(path: Path, model: DescribeReply, provider: Provider) -> str:
    """Why a context that shares its sidecar with another is not to be opened: simulators crash."""
    if not provider.shares_weights or provider.loads_shared:
        return ""
    others = [
        other
        for other in path.parent.glob("*.onnx")
        if other.name != path.name and other.stat().st_size < SMALL
    ]
    for sidecar in {context.sidecar for context in model.contexts} - {""}:
        for other in others:
            if sidecar.encode() in other.read_bytes():
                return (
                    f"it shares {sidecar} with {other.name}, and {provider.ep} cannot open contexts that "
                    "share weights here"
                )
    return ""


def prove(
    path: Path, model: DescribeReply, job: Job, staging: Path, workers: Workers, *, has_source: bool
) -> Proof:
    """Load and run the artifact at ``path`` on the job's target, from a moved copy of what it names.

    With ``has_source`` the job's model is the source to compare with; if not, it is the artifact itself.
    Raises BuildError when it cannot be run here, or does not pass.
    """
    spec = model_spec_of(job.models[0], job.target)
    if why := cannot(job) or _cannot_be_opened_alone(path, model, job.target.provider):
        raise BuildError(
            Problem(str(path), f"{why}.", "Take --structure, to have its files checked.")
        )
    moved = staging / "moved"
    moved.mkdir()
    names = [path.name, *model.external_data]
    names += [context.sidecar for context in model.contexts if context.sidecar]
    for name in dict.fromkeys(names):
        (moved / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy((path.parent / name).resolve(), moved / name)
    fixed = {
        tensor.name: tuple(size for size in tensor.shape if isinstance(size, int))
        for tensor in model.inputs
        if all(isinstance(size, int) for size in tensor.shape)
    }
    request = ValidateRequest(
        # The source has the shapes that were fixed when it was compiled.
        replace(spec, shapes={**fixed, **spec.shapes}) if has_source else spec,
        target_spec(job.target),
        job.target.provider.product,
        Context(spec.name, path.name, model.inputs, model.outputs),
        str(moved),
        job.models[0].tolerance_for(job.target.provider) if has_source else None,
        has_source=has_source,
    )
    reply: ValidateReply = workers.call(request, staging / "validate", where=str(path))
    if reply.absent:
        raise BuildError(
            Problem(
                str(path), f"it was run on the CPU only: {reply.absent}.", "Run it where its EP is."
            )
        )
    return Proof("run", reply.agreements)

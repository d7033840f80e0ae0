"""The tables of ``[tool.epcontext]`` as they are written: the one place that says which keys there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hatch_epcontext.environment import Editable, Validate
from hatch_epcontext.providers import Device, OptionValue

KEY = "tool.epcontext"

Optimization = Literal["none", "basic", "extended", "all"]
Fallback = Literal["source", "none"]
Policy = Literal[
    "default",
    "prefer-cpu",
    "prefer-npu",
    "prefer-gpu",
    "max-performance",
    "max-efficiency",
    "min-overall-power",
]
Options = Mapping[str, OptionValue]

MADE_UP = ("ones", "random", "zeros")
"""Dummy inputs that need no file."""


def _key(doc: str, default: Any = None) -> Any:
    """A key with its documentation; without a default of its own it may be left out."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def _required(doc: str, empty: Any) -> Any:
    """A key that has to be there, which `checks` sees to: ``empty`` stands for one that is not."""
    return field(default=empty, metadata={"doc": doc, "required": True})


@dataclass(frozen=True, kw_only=True)
class ProfileTable:
    """The shapes of one input in one optimization profile."""

    min: tuple[int, ...] = _required("The least shape.", ())
    opt: tuple[int, ...] = _required("The shape to optimize for.", ())
    max: tuple[int, ...] = _required("The greatest shape.", ())


@dataclass(frozen=True, kw_only=True)
class NarrowableTable:
    """Keys of a target that a model may narrow: tables are merged, other values replaced."""

    provider_options: Options = _key(
        "Options of the execution provider, checked by name and value.", {}
    )
    session_options: Options = _key(
        "ONNX Runtime's session options, for compiling and loading.", {}
    )
    load_options: Options = _key("Provider options for the loader only.", {})
    device: Device | None = _key(
        "The device that the loader must find; the provider's own if left out."
    )
    device_filter: Mapping[str, str | int] = _key(
        "What else the device has to be: `type`, `vendor`, or any of the EP's metadata.", {}
    )
    policy: Policy | None = _key("ONNX Runtime's own choice among the EP's devices.")
    profiles: tuple[Mapping[str, ProfileTable], ...] = _key(
        "Optimization profiles: for each input `min`, `opt` and `max` shapes.", ()
    )
    optimization: Optimization | None = _key(
        "ONNX Runtime's graph optimization before partitioning; `basic` if left out."
    )
    embed: bool | Literal["auto"] | None = _key(
        "The blob inside the context model, or (false) beside it as a sidecar; `auto` if left out."
    )
    in_memory: bool | None = _key(
        "Compile from memory to memory, with the blob inside the context model; false if left out."
    )
    external_initializers: bool | None = _key(
        "What is left outside of the contexts in a file of its own; false if left out."
    )
    external_initializers_threshold: int | None = _key(
        "Bytes from which an initializer goes there; 1024 if left out."
    )
    min_coverage: float | None = _key(
        "Fail when less than this share of the nodes is compiled; 1.0 if left out."
    )


@dataclass(frozen=True, kw_only=True)
class _WholeTarget(NarrowableTable):
    """Keys of a target that no model can narrow."""

    platforms: tuple[str, ...] = _key("Wheel platform tags that this target is for.", ())
    requirements: tuple[str, ...] | None = _key(
        "What to install for compiling, instead of the provider's own."
    )
    allow_unknown_options: bool = _key("Take provider options as they are, without a check.", False)
    virtual_devices: bool = _key("Compile for a device that the EP offers and is not there.", False)
    library: str | None = _key(
        "The EP's plugin library: a package with `get_library_path()`, or a path."
    )
    ep_name: str | None = _key("What ONNX Runtime calls the EP (provider `plugin`).")
    registration_name: str | None = _key(
        "The name to register the library under; `ep-name` if left out."
    )


@dataclass(frozen=True, kw_only=True)
class TargetTable(_WholeTarget):
    """``[tool.epcontext.targets.<name>]``."""

    provider: str = _required("The execution provider.", "")


@dataclass(frozen=True, kw_only=True)
class ToleranceTable:
    """How far outputs may be from the CPU's; what is left out, the provider says."""

    rtol: float | None = _key("Relative to each reference value.")
    atol: float | None = _key(
        "Absolute, or relative to the output's largest value where that is above 1."
    )
    cosine: float | None = _key("The least cosine similarity.")


@dataclass(frozen=True, kw_only=True)
class ModelTable(NarrowableTable):
    """``[[tool.epcontext.models]]``."""

    path: str = _required("The ONNX file, relative to `pyproject.toml`.", "")
    name: str | None = _key("What the app loads it by; the file's stem if left out.")
    targets: tuple[str, ...] | None = _key("Targets by name; `default-targets` if left out.")
    share_weights: str | None = _key(
        "Models of one group are compiled together, and share one sidecar."
    )
    dims: Mapping[str, int] = _key("Sizes of symbolic dimensions, by name.", {})
    shapes: Mapping[str, tuple[int, ...]] = _key("Whole shapes, by input.", {})
    constants: Mapping[str, Any] = _key("Inputs frozen to a value, by input.", {})
    inputs: str = _key(
        "Dummy inputs: `ones`, `zeros`, `random`, an `.npz`, or a folder of `.pb`.", "random"
    )
    tolerance: ToleranceTable | Literal[False] | None = _key(
        "How far outputs may be from the CPU's; false for no comparison."
    )
    validate: Validate = _key(
        "`auto` runs where the provider can, `require` insists, `structure` never runs, false does nothing.",
        "auto",
    )


@dataclass(frozen=True, kw_only=True)
class RootTable(_WholeTarget):
    """``[tool.epcontext]``: with ``provider`` the short form, which has one target named after it."""

    provider: str | None = _key("The short form: the provider of the only target.")
    models: tuple[str | ModelTable, ...] = _required("Paths, globs or tables.", ())
    targets: Mapping[str, TargetTable] = _key("The long form: targets by name.", {})
    output: str | None = _key("Where in the wheel; `<import package>/epcontext` if left out.")
    default_targets: tuple[str, ...] | None = _key(
        "Targets of models that name none; all if left out."
    )
    jobs: int | Literal["auto"] = _key("Worker processes at once.", "auto")
    timeout: float = _key("Seconds for one worker.", 1800.0)
    fallback: Fallback = _key("Ship the source model too (`source`), or not (`none`).", "source")
    editable: Editable = _key(
        "What an editable install gets: `source`, `compile` or `skip`.", "source"
    )
    max_size: int | str | None = _key(
        'Fail when the wheel is larger: bytes, or a size such as "250 MB".'
    )
    wheel_tag: str = _key("`auto`, `any`, or a tag such as `py3-none-win_arm64`.", "auto")

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


def _key(doc: str, default: Any = None, *, left_out: str = "") -> Any:
    """A key with its documentation; ``left_out``: what holds without it, where the default cannot say."""
    metadata = {"doc": doc, "left_out": left_out}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _required(doc: str, empty: Any) -> Any:
    """A key that has to be there, which `checks` sees to: ``empty`` stands for one that is not."""
    return field(default=empty, metadata={"doc": doc, "left_out": "", "required": True})


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
        "Options of the execution provider, by its page in `docs/providers.md`: checked by name "
        "and value. `true` and numbers become the strings that it wants.",
        {},
    )
    session_options: Options = _key(
        "ONNX Runtime's session options, for compiling and loading.", {}
    )
    load_options: Options = _key(
        "Provider options for the loader only; `{user-cache}` in one is a folder that the loader "
        "makes.",
        {},
    )
    device: Device | None = _key(
        "What to compile for, and what the loader must find.", left_out="the provider's own"
    )
    device_filter: Mapping[str, str | int] = _key(
        "What else the device has to be: `type`, `vendor`, `vendor-id`, `device-id`, or any of "
        'the EP\'s metadata, such as `{ npu_platform = "4000" }`.',
        {},
    )
    policy: Policy | None = _key("Let ONNX Runtime choose among the EP's devices.")
    profiles: tuple[Mapping[str, ProfileTable], ...] = _key(
        "Optimization profiles (TensorRT, TensorRT RTX): a list of tables, each with `min`, "
        "`opt` and `max` shapes by input.",
        (),
    )
    optimization: Optimization | None = _key(
        "ONNX Runtime's graph optimization before partitioning.", left_out='`"basic"`'
    )
    embed: bool | Literal["auto"] | None = _key(
        'The compiled blob inside the context model (`true`) or beside it (`false`); `"auto"` is '
        "beside it, which large models need.",
        left_out='`"auto"`',
    )
    in_memory: bool | None = _key(
        "Compile from memory to memory, with the blob inside the context model.", left_out="`false`"
    )
    external_initializers: bool | None = _key(
        "Weights of what is left outside of the contexts, or of an optimized graph, in a file of "
        "their own.",
        left_out="`false`",
    )
    external_initializers_threshold: int | None = _key(
        "Bytes from which they go there.", left_out="`1024`"
    )
    min_coverage: float | None = _key(
        "Fail when less than this share of a model's nodes is compiled.", left_out="`1.0`"
    )


@dataclass(frozen=True, kw_only=True)
class _WholeTarget(NarrowableTable):
    """Keys of a target that no model can narrow."""

    platforms: tuple[str, ...] = _key(
        "Wheel platform tags that this target is for, such as `win_arm64`.", (), left_out="any"
    )
    requirements: tuple[str, ...] | None = _key(
        "What to install for compiling, instead of the provider's own.", left_out="the provider's"
    )
    allow_unknown_options: bool = _key(
        "Take provider options as they are, without a check: for an EP that is newer than this "
        "package.",
        False,
    )
    virtual_devices: bool = _key(
        "Compile for a device that the EP offers although it is not there (OpenVINO's NPUs).", False
    )
    library: str | None = _key(
        "The EP's plugin library: a package with `get_library_path()`, or a path.",
        left_out="the provider's",
    )
    ep_name: str | None = _key("What ONNX Runtime calls the EP of the provider `plugin`.")
    registration_name: str | None = _key(
        "The name to register its library under.", left_out="`ep-name`"
    )


@dataclass(frozen=True, kw_only=True)
class TargetTable(_WholeTarget):
    """``[tool.epcontext.targets.<name>]``."""

    provider: str = _required(
        "The execution provider, by its name in `docs/providers.md` or by ONNX Runtime's.", ""
    )


@dataclass(frozen=True, kw_only=True)
class ToleranceTable:
    """How far outputs may be from the CPU's; what is left out, the provider says."""

    rtol: float | None = _key("Relative to each reference value.", left_out="the provider's")
    atol: float | None = _key(
        "Absolute, or relative to the output's largest value where that is above 1.",
        left_out="the provider's",
    )
    cosine: float | None = _key("The least cosine similarity.", left_out="the provider's")


@dataclass(frozen=True, kw_only=True)
class ModelTable(NarrowableTable):
    """``[[tool.epcontext.models]]``."""

    path: str = _required("The ONNX file, relative to `pyproject.toml`.", "")
    name: str | None = _key("What the app loads it by.", left_out="the file's stem")
    targets: tuple[str, ...] | None = _key("Targets by name.", left_out="`default-targets`")
    share_weights: str | None = _key(
        "Models of one group are compiled together and share one sidecar, for those targets "
        "whose EP can."
    )
    dims: Mapping[str, int] = _key("Sizes of symbolic dimensions, by name.", {})
    shapes: Mapping[str, tuple[int, ...]] = _key("Whole shapes, by input.", {})
    constants: Mapping[str, Any] = _key(
        "Inputs frozen to a value, by input; the dtype is the model's.", {}
    )
    inputs: str = _key(
        "Dummy inputs: `random` (seeded), `ones`, `zeros`, an `.npz`, or a folder with "
        "`input_*.pb`.",
        "random",
    )
    tolerance: ToleranceTable | Literal[False] | None = _key(
        "How far outputs may be from the CPU's; `false` for no comparison.",
        left_out="the provider's",
    )
    validate: Validate = _key(
        "`auto` runs the artifact where the provider can; `require` fails where it cannot; "
        "`structure` checks the files only; `false` does nothing.",
        "auto",
    )


@dataclass(frozen=True, kw_only=True)
class RootTable(_WholeTarget):
    """``[tool.epcontext]``: with ``provider`` the short form, which has one target named after it."""

    provider: str | None = _key("The short form: the provider of the only target.")
    models: tuple[str | ModelTable, ...] = _required("Paths, globs or tables.", ())
    targets: Mapping[str, TargetTable] = _key("The long form: targets by name.", {})
    output: str | None = _key(
        "Where in the wheel the package goes.", left_out="`<import package>/epcontext`"
    )
    default_targets: tuple[str, ...] | None = _key(
        "Targets of models that name none.", left_out="all"
    )
    jobs: int | Literal["auto"] = _key(
        "Worker processes at once; `auto` is one a core, at most 4.", "auto"
    )
    timeout: float = _key("Seconds for one worker.", 1800.0)
    fallback: Fallback = _key(
        "`source` ships the source model too, so that any machine can run it; `none` does not.",
        "source",
    )
    editable: Editable = _key("What `pip install -e` gets.", "source")
    max_size: int | str | None = _key(
        'Fail when the wheel is larger: bytes, or a size such as `"250 MB"`. Without it a wheel '
        "beyond 100 MB, which indexes refuse by default, is a warning with its largest files."
    )
    wheel_tag: str = _key(
        "`auto` joins the `platforms` of all targets, and leaves the tag to Hatch as soon as one "
        "target has none; `any`; or a tag such as `py3-none-win_arm64`.",
        "auto",
    )

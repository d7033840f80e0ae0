# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Opens precompiled ONNX models, which hatch-epcontext has put into this package.

    from my_app.epcontext import load

    session = load("model")  # an onnxruntime.InferenceSession

``load`` tries the model's targets in order, and opens the first that this machine can run. If there is
none, it opens the source model on the CPU. ``explain`` lists the outcome and the reason for each target.

The folder of this module is an ONNX Runtime model package; ``load`` opens other packages too. This
module is a copy of ``hatch_epcontext/loader.py`` in hatch-epcontext, under the MIT licence
(https://github.com/hatch-epcontext/hatch-epcontext); the version is in ``manifest.json``. It needs
Python's standard library and onnxruntime with its numpy, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ntpath
import operator
import os
import posixpath
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

# Other modules are imported where they are needed: importing this one costs an app almost nothing.
if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime

__all__ = [
    "LoadError",
    "Outcome",
    "Step",
    "explain",
    "load",
    "models",
    "path",
    "shapes_of",
    "target_of",
]

Device = Literal["npu", "gpu", "cpu", "any"]
Fallback = Literal["cpu", "jit"]
Shapes = Mapping[str, Sequence[int]]

SOURCE = "source"
"""The name of the last target, which is the source model on the CPU."""

USER_CACHE = "{user-cache}"
"""Stands in a provider option for the app's own folder inside the user's cache folder."""

METADATA = "hatch-epcontext"
"""The key of this module's own part of ``additional_metadata`` in the manifest."""

PREPARED = "prepared"
"""The folder, inside that of a target, with the prepared model; also the key that names its file."""

CPU_EP = "CPUExecutionProvider"

USER_CACHE_LIMIT = 4 * 2**30
"""The size in bytes that each folder in the user's cache may have: contexts that were compiled on this
machine, and copies of files in an archive."""

_DAY = 24 * 60 * 60.0
_MANIFEST = "manifest.json"
_SCHEMA = "1"

# With the files of a context that was compiled on this machine, beside them.
_RECORD = "files.json"

# What Windows says of a device, and may change when it starts again.
_VOLATILE_FACTS = ("LUID", "DxgiAdapterNumber", "DxgiHighPerformanceIndex")

# Session options that name a file of the package.
PATH_OPTIONS = frozenset(
    {"ep.context_file_path", "session.model_external_initializers_file_folder_path"}
)

# Session options that name a file to write: onnxruntime's own reader refuses a package with one too.
OUTPUT_OPTIONS = frozenset(
    {
        "session.collect_node_memory_stats_to_file",
        "session.debug_layout_transformation",
        "session.enable_profiling",
        "session.optimized_model_filepath",
    }
)

# Provider options that name libraries, which an EP loads.
_LIBRARY_OPTIONS = frozenset(
    {
        "backend_path",
        "op_packages",
        "trt_engine_decryption_lib_path",
        "trt_extra_plugin_lib_paths",
    }
)

# Options that name files and folders, which an EP reads or writes. It takes a relative one from the
# working directory, which can be any folder. In lower case: those in OpenVINO's load_config have upper case.
_FILE_OPTIONS = frozenset(
    {
        "cache_dir",
        "config_file",
        "context_file_path",
        "dump_qnn_ep_input_graph_dir",
        "dump_qnn_ir_dlc_dir",
        "framework_op_trace_dir",
        "json_qnn_graph_dir",
        "migraphx_int8_calibration_table_name",
        "migraphx_load_model_path",
        "migraphx_model_cache_dir",
        "migraphx_save_model_path",
        "model_external_initializers_file_folder_path",
        "modelcachedirectory",
        "nv_profiling_output_file",
        "nv_runtime_cache_path",
        "profiling_file_path",
        "qnn_ir_backend_path",
        "qnn_saver_path",
        "trt_engine_cache_path",
        "trt_ep_context_file_path",
        "trt_int8_calibration_table_name",
        "trt_onnx_model_folder_path",
        "trt_timing_cache_path",
        "weights_path",
        "xclbin",
    }
)

# Options with names of tensors or nodes, which may look like paths.
_GRAPH_OPTIONS = frozenset(
    {
        "context_node_name_prefix",
        "forcecpunodenames",
        "layout",
        "nv_profile_max_shapes",
        "nv_profile_min_shapes",
        "nv_profile_opt_shapes",
        "op_affinity",
        "reshape_input",
        "trt_profile_max_shapes",
        "trt_profile_min_shapes",
        "trt_profile_opt_shapes",
    }
)

# EPs that can be asked about a compatibility string at any time, from trials in many processes.
_SAFE_TO_ASK = frozenset({"OpenVINOExecutionProvider"})

# For packages of other tools, which do not name the package of an EP's library.
_KNOWN_PLUGINS = {
    "QNNExecutionProvider": "onnxruntime_qnn",
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "NvTensorRTRTXExecutionProvider": "onnxruntime_ep_nv_tensorrt_rtx",
    "WebGpuExecutionProvider": "onnxruntime_ep_webgpu",
}

# What this module reads of a manifest: a type for each value, which may be missing where None is another
# choice. "*" stands for any name, and names that are not here may have any value.
_OPTIONS = ({"*": str}, None)
_SHAPE = [(int, str, None)]
_MANIFEST_FORM = {
    "schema_version": (str, int),
    "layout": (str, None),
    "components": {"*": (dict, str)},
    "shared_assets": ({"*": str}, None),
}
_COMPONENT_FORM = {"variants": {"*": dict}}
_VARIANT_FORM = {
    "variant_directory": (str, None),
    "ep": (str, None),
    "device": (str, None),
    "compatibility_string": (str, None),
    "executor_info": ({"ort": (dict, str, None)}, None),
}
_ORT_FORM = {"model_file": str, "session_options": _OPTIONS, "provider_options": _OPTIONS}
_OUR_PACKAGE_FORM = {
    "files": ({"*": {"size": int, "sha256": str}}, None),
    "manifest_sha256": (str, None),
}
_OUR_COMPONENT_FORM = {
    "model": (str, None),
    "constants": ({"*": {"dtype": str, "shape": _SHAPE}}, None),
}
_OUR_VARIANT_FORM = {
    "inputs": ([{"name": str, "shape": _SHAPE}], None),
    "load_options": _OPTIONS,
    "needs_code_page": (bool, None),
    "needs_device": (bool, None),
    "plugin": ({"module": str, "package": str, "registration_name": str}, None),
    "prepared": (str, None),
    "secrets": ([str], None),
    "settings": (
        {
            "device": (str, None),
            "device_filter": _OPTIONS,
            "embed": (bool, None),
            "optimization": (str, None),
            "policy": (str, None),
            "provider_options": _OPTIONS,
            "session_options": _OPTIONS,
        },
        None,
    ),
    "sharing": ({"group": str}, None),
}
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
}

_groups_lock = threading.Lock()
_target_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# For each session that shares weights, the earlier sessions of its group, which have to outlive it.
_earlier_sessions: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_groups: dict[tuple[str, str, str], weakref.WeakSet[Any]] = {}
_packages: dict[str, tuple[Any, _Package]] = {}


def _printable(text: str) -> str:
    """``text`` with escapes for characters that would act on a terminal: names are from the manifest."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


class LoadError(RuntimeError):
    """No session could be opened. The message has the reason for each target."""

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


class Outcome(str, Enum):
    """The outcome of trying a target. Each member equals its text: ``Outcome.OPENED == "opened"``."""

    OPENED = "opened"
    SKIPPED = "skipped"
    """This machine cannot or should not run the target."""
    FAILED = "failed"
    """onnxruntime raised an error, or a file is missing or damaged."""
    NOT_TRIED = "not tried"
    """An earlier target was opened."""


class Step(NamedTuple):
    """One target, its outcome, and the reason for it; for an opened target, what it runs on."""

    target: str
    outcome: Outcome
    reason: str | None

    def __str__(self) -> str:
        # `.value`, because Python 3.12 changed how members of such an Enum are formatted.
        text = f"{self.target}: {self.outcome.value}"
        return _printable(f"{text}, {self.reason}" if self.reason else text)


class _SkipTargetError(Exception):
    """This machine cannot or should not run a target."""


class _FileError(Exception):
    """A file of the package is missing or damaged; the message names it."""


def models(package: str | os.PathLike[str] | None = None) -> list[str]:
    """The names of the models in this package, or in the model package in the folder ``package``."""
    return list(_package(package).models)


def load(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    shapes: Shapes | None = None,
    fallback: Fallback | None = "cpu",
    verify: bool = False,
    package: str | os.PathLike[str] | None = None,
    session_options: onnxruntime.SessionOptions
    | Callable[[], onnxruntime.SessionOptions]
    | None = None,
    provider_options: Mapping[str, object] | None = None,
    windows_ml: bool = False,
) -> onnxruntime.InferenceSession:
    """Open the model ``name`` on the first target that this machine can run.

    ``target``: try only this target ("source" for the source model on the CPU, if it is shipped).
    ``device``: try only targets on a device of this kind. "any" also accepts a device that only
    simulates the target's device. By default each target needs the device that it was built for.
    ``shapes``: the shapes of the inputs that the app has, by input. A model that was compiled for
    several shapes is opened in the smallest that is large enough in every dimension, or on a target
    with open shapes; ``shapes_of`` returns the shapes to pad to. Without it the first listed is opened.
    ``fallback``: what to do where a target cannot be opened. "cpu" tries the next one, and last opens
    the source model on the CPU, if it is shipped. "jit" does the same, but first compiles for a target
    that was built with ``recompile = true``: on this machine, once, into the user's cache folder. None
    tries the next target, and never opens the source model.
    ``verify``: compare the manifest and all files beside the model with the sha256 in the manifest before
    they are opened. A file that the manifest does not list is an error then.
    ``package``: the folder of another model package, instead of the one that contains this module.
    ``session_options``: the app's own session options, to which the target's settings and execution
    provider are added. A function that creates them is called once for each target that is tried.
    ``provider_options``: more options of the execution provider, such as the address of a stream, or a
    secret with which the target was compiled. They are used for all targets except the source model.
    ``windows_ml``: first register the EPs that the catalogue of Windows ML (the package windowsml) has ready
    on this machine. It downloads none; where there is no catalogue it does nothing.

    Raises LoadError when no target could be opened, when the package is damaged, and when it has no
    such model, target or shape.
    """
    if windows_ml:
        _register_ready()
    request = _checked(device, shapes, fallback, verify, session_options, provider_options)
    steps: list[Step] = []
    session = None
    for step, opened in _try_targets(_package(package), name, target, request):
        steps.append(step)
        _log("warning" if step.outcome is Outcome.FAILED else "info", "%s on %s", name, step)
        session = opened or session
    if session is None:
        lines = "\n".join(f"  {step}" for step in steps)
        raise LoadError(f"the model {name!r} cannot be opened on this machine:\n{lines}")
    return session


def explain(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    shapes: Shapes | None = None,
    fallback: Fallback | None = "cpu",
    verify: bool = False,
    package: str | os.PathLike[str] | None = None,
    session_options: onnxruntime.SessionOptions
    | Callable[[], onnxruntime.SessionOptions]
    | None = None,
    provider_options: Mapping[str, object] | None = None,
    windows_ml: bool = False,
) -> list[Step]:
    """The steps of `load` with the same arguments. It opens a session to find out."""
    if windows_ml:
        _register_ready()
    request = _checked(device, shapes, fallback, verify, session_options, provider_options)
    return [step for step, _ in _try_targets(_package(package), name, target, request)]


def target_of(session: onnxruntime.InferenceSession) -> str:
    """The target on which `load` opened ``session``; "source" for the source model on the CPU.

    Raises KeyError for a session that `load` did not open.
    """
    return _target_names[session]


def shapes_of(session: onnxruntime.InferenceSession) -> dict[str, tuple[int | str | None, ...]]:
    """The shape of each input of ``session``: sizes to pad to, or the name of an open dimension."""
    return {each.name: tuple(each.shape) for each in session.get_inputs()}


@contextlib.contextmanager
def path(
    name: str,
    target: str | None = None,
    *,
    package: str | os.PathLike[str] | None = None,
) -> Iterator[Path]:
    """The path of a model file, with its sidecars beside it, for tools that open it themselves.

    ``target`` is the first of the model's targets by default. Files inside a zip archive are copied once,
    into the user's cache folder. Raises LoadError as `load` does.
    """
    found = _package(package)
    variants = _choose(found, name, target, None)
    if not variants:
        raise LoadError(f"the model {name!r} has no targets in {found.location}")
    with contextlib.ExitStack() as stack:
        try:
            file = found.on_disk(variants[0], stack, verify=False)
        except Exception as error:
            raise LoadError(f"{name} on {variants[0].target}: {error}") from error
        yield file


class _Request(NamedTuple):
    """The arguments of `load` that do not choose a model."""

    device: Device | None
    shapes: Shapes | None
    fallback: Fallback | None
    verify: bool
    session_options: Any
    provider_options: dict[str, object]


def _checked(
    device: Device | None,
    shapes: Shapes | None,
    fallback: Fallback | None,
    verify: bool,
    session_options: Any,
    provider_options: Mapping[str, object] | None,
) -> _Request:
    """The request with these arguments. Raises LoadError for a value that an argument does not take."""
    if device not in (None, "npu", "gpu", "cpu", "any"):
        raise LoadError(f"device must be 'npu', 'gpu', 'cpu', 'any' or None, not {device!r}")
    if fallback not in (None, "cpu", "jit"):
        raise LoadError(f"fallback must be 'cpu', 'jit' or None, not {fallback!r}")
    if not isinstance(provider_options or {}, Mapping):
        # Without the value, which can be a secret.
        raise LoadError(
            f"provider_options must be a mapping, not {type(provider_options).__name__}"
        )
    known = session_options is None or callable(session_options)
    if not known and not hasattr(session_options, "add_session_config_entry"):
        raise LoadError(f"session_options must be SessionOptions, not {session_options!r}")
    sizes = _sizes(shapes) if shapes else None
    return _Request(device, sizes, fallback, verify, session_options, dict(provider_options or {}))


def _sizes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """``shapes`` in Python's own types: sizes may also be integers of numpy, or a framework's shape."""
    try:
        sizes = {name: tuple(map(operator.index, shape)) for name, shape in shapes.items()}
    except (AttributeError, TypeError):
        sizes = {"": (-1,)}
    if any(size < 0 for shape in sizes.values() for size in shape):
        raise LoadError(
            "shapes must have the sizes of each input by its name, such as {'x': (1, 3, 224, 224)}, "
            f"not {shapes!r}"
        )
    return sizes


class _Variant(NamedTuple):
    """A variant of a component, with this module's own part of its metadata.

    ``folder`` and ``model_file`` are relative to the package, with forward slashes. ``model_file`` is
    empty if the manifest does not name it.
    """

    target: str
    component: str
    folder: str
    model_file: str
    ep: str
    device: str | None
    compatibility: str
    session_options: dict[str, str]
    provider_options: dict[str, str]
    ours: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return self.ours.get("settings") or {}

    @property
    def is_source(self) -> bool:
        return bool(self.ours) and self.target == SOURCE

    @property
    def kind_of_device(self) -> str:
        """The kind of device that the target was built for."""
        kind: str = (
            self.settings.get("device") or self.device or ("cpu" if self.ep == CPU_EP else "any")
        )
        return kind

    @property
    def input_shapes(self) -> dict[str, tuple[int | str | None, ...]]:
        return {each["name"]: tuple(each["shape"]) for each in self.ours.get("inputs") or ()}


class _Package:
    """A model package that was read: its models, and where its files are."""

    def __init__(self, root: Any, location: str, *, is_archive: bool) -> None:
        self.root, self.location, self.is_archive = root, location, is_archive
        # The JSON files as they were read, for `verify_texts`.
        self._texts: dict[str, bytes] = {}
        content = self._json(_MANIFEST)
        place = f"{_MANIFEST}:"
        version = content.get("schema_version")
        self._check(version, (str, int), f"{place}.schema_version")
        if str(version).partition(".")[0] != _SCHEMA:
            raise LoadError(
                f"{location}: {_MANIFEST} has the schema {version}, and this loader reads {_SCHEMA}.x"
            )
        self._check(content, _MANIFEST_FORM, place)
        layout = content.get("layout") or "portable"
        if layout not in ("portable", "installed"):
            raise self._error(f"{place}.layout", f" is {layout!r}, which is unknown")
        # An archive cannot contain what is outside of it.
        self.is_confined = layout == "portable" or self.is_archive
        about = self._ours(content, _OUR_PACKAGE_FORM, place)
        self.files: dict[str, dict[str, Any]] = about.get("files") or {}
        for name in self.files:
            self._inside(name, f"{place}.additional_metadata.{METADATA}.files")
        self._checksum: str = about.get("manifest_sha256") or ""
        self._assets: dict[str, str] = content.get("shared_assets") or {}
        self.components: dict[str, tuple[_Variant, ...]] = {}
        self.constants: dict[str, dict[str, Any]] = {}
        self.models: dict[str, list[str]] = {}
        self._files_of_variants: dict[tuple[str, str], list[str]] = {}
        for name, body in content["components"].items():
            self._add_component(name, body, f"{place}.components.{name}")

    def _add_component(self, name: str, body: Any, place: str) -> None:
        folder = ""
        if isinstance(body, str):
            file = self._inside(body, place)
            if not file.endswith(".json"):
                file += "/component.json"
            folder, body, place = posixpath.dirname(file), self._json(file), f"{file}:"
        self._check(body, _COMPONENT_FORM, place)
        self.components[name] = tuple(
            variant
            for target, each in body["variants"].items()
            if (variant := self._variant(name, target, each, folder, f"{place}.variants.{target}"))
            is not None
        )
        about = self._ours(body, _OUR_COMPONENT_FORM, place)
        self.constants[name] = about.get("constants") or {}
        self.models.setdefault(about.get("model") or name, []).append(name)

    def _variant(
        self, component: str, target: str, body: Any, parent: str, place: str
    ) -> _Variant | None:
        self._check(body, _VARIANT_FORM, place)
        directory = body.get("variant_directory")
        directory = self._inside(
            target if directory is None else directory, f"{place}.variant_directory"
        )
        folder = _join(parent, directory)
        about = self._ours(body, _OUR_VARIANT_FORM, place)
        ours = f"{place}.additional_metadata.{METADATA}"
        if about.get(PREPARED):
            self._inside(about[PREPARED], f"{ours}.{PREPARED}")
        module = (about.get("plugin") or {}).get("module", "")
        if module and not all(map(str.isidentifier, module.split("."))):
            raise self._error(f"{ours}.plugin.module", " must be the dotted name of a module")
        executors = body.get("executor_info") or {}
        info = executors.get("ort")
        if executors and info is None:
            # It is for another program than ONNX Runtime.
            return None
        model_file = ""
        if info is not None:
            place = f"{place}.executor_info.ort"
            if isinstance(info, str):
                file = _join(folder, self._inside(info, place))
                info, place = self._json(file), f"{file}:"
            self._check(info, _ORT_FORM, place)
            model_file = self._file(info["model_file"], folder, f"{place}.model_file")
        session_options = dict((info or {}).get("session_options") or {})
        compiled_with = (about.get("settings") or {}).get("session_options") or {}
        for where, given in ((place, session_options), (f"{ours}.settings", compiled_with)):
            for key in sorted(OUTPUT_OPTIONS & given.keys()):
                raise self._error(f"{where}.session_options.{key}", " names a file to write")
        for key in PATH_OPTIONS & session_options.keys():
            session_options[key] = self._file(session_options[key], folder, f"{place}.{key}")
        return _Variant(
            target,
            component,
            folder,
            model_file,
            body.get("ep") or CPU_EP,
            body.get("device"),
            body.get("compatibility_string") or "",
            session_options,
            dict((info or {}).get("provider_options") or {}),
            about,
        )

    def _file(self, name: str, folder: str, place: str) -> str:
        if not name.startswith("sha256:"):
            return _join(folder, self._inside(name, place))
        asset, _, rest = name.partition("/")
        default = f"shared_assets/sha256-{self._inside(asset.removeprefix('sha256:'), place)}"
        folder = self._inside(self._assets.get(asset, default), place)
        return _join(folder, self._inside(rest, place)) if rest else folder

    def _json(self, name: str) -> dict[str, Any]:
        import json

        file = self.root / name
        # Reading from a pipe would not end.
        if file.exists() and not file.is_file():
            raise LoadError(f"{self.location}: {name} cannot be read (it is not a file)")
        try:
            text = file.read_bytes()
        except Exception as error:
            # Of any kind: archives raise their own errors.
            raise LoadError(f"{self.location}: {name} cannot be read ({error})") from None
        self._texts[name] = text
        try:
            content = json.loads(text, parse_constant=_refuse_constant)
            if b"\\u" in text:
                # Half characters, which are in no path and no option: other parsers refuse them.
                json.dumps(content, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{self.location}: {name} is not JSON ({error})") from None
        if not isinstance(content, dict):
            raise LoadError(f"{self.location}: {name} is not a JSON object")
        return content

    def _check(self, value: Any, form: Any, place: str) -> None:
        if problem := _misfit(value, form):
            raise self._error(place, problem)

    def _error(self, place: str, problem: str) -> LoadError:
        """``place`` is a file, a colon, and a dot before each key."""
        return LoadError(f"{self.location}: {(place + problem).replace(':.', ': ', 1)}")

    def _ours(self, body: dict[str, Any], form: Any, place: str) -> dict[str, Any]:
        """This module's own part of the metadata of a package, a component or a variant."""
        metadata = body.get("additional_metadata")
        if not isinstance(metadata, dict) or METADATA not in metadata:
            # Other tools may write anything there.
            return {}
        about: dict[str, Any] = metadata[METADATA]
        self._check(about, form, f"{place}.additional_metadata.{METADATA}")
        return about

    def _inside(self, name: str, place: str) -> str:
        """``name``, which must not leave the package if the package can be moved."""
        if not name or (self.is_confined and _leaves(name)):
            raise self._error(place, f" names a file outside of the package: {name!r}")
        return name

    def verify_texts(self) -> None:
        """Raise _FileError if the manifest, a JSON file that it names or this module is not as recorded."""
        import hashlib

        recorded = {name: each["sha256"] for name, each in self.files.items()}
        recorded[_MANIFEST] = self._checksum
        for name, text in self._texts.items():
            if not (sha256 := recorded.get(name)):
                raise _FileError(f"{name} has no recorded sha256, and cannot be verified")
            # A file cannot contain its own sha256: that of the manifest is with zeros in this place.
            own = text.replace(sha256.encode(), b"0" * 64) if name == _MANIFEST else text
            if hashlib.sha256(own).hexdigest() != sha256:
                raise _changed(name)
        for name in self.files.keys() - self._texts.keys():
            # Frozen apps have their modules elsewhere.
            if "/" not in name and (self.root / name).is_file():
                content = (self.root / name).read_bytes()
                if hashlib.sha256(content).hexdigest() != recorded[name]:
                    raise _changed(name)

    def on_disk(self, variant: _Variant, stack: contextlib.ExitStack, *, verify: bool) -> Path:
        """The model file of ``variant`` on disk, with its sidecars beside it.

        ``stack`` holds the temporary folder of files from an archive, where the user's cache cannot have
        them. Raises _FileError when a file is missing, has another size than it was recorded with, or is
        a link that leads out of the package; with ``verify`` also if its sha256 differs, and if it was
        not recorded.
        """
        model_file = variant.model_file or self._only_model(variant.folder)
        folders = self._folders_of(variant, model_file)
        return self._on_disk(model_file, folders, self._files_of(variant, folders), stack, verify)

    def prepared_on_disk(self, variant: _Variant, stack: contextlib.ExitStack) -> Path:
        """The prepared model of ``variant`` on disk, with its external data, compared by sha256."""
        file = _join(variant.folder, variant.ours[PREPARED])
        folders = {posixpath.dirname(file)}
        return self._on_disk(file, folders, self.prepared_files(variant), stack, True)

    def prepared_files(self, variant: _Variant) -> list[str]:
        """The prepared model of ``variant`` and its external data."""
        prefix = f"{variant.folder}/{PREPARED}/"
        return [name for name in self.files if name.startswith(prefix)]

    def _only_model(self, folder: str) -> str:
        """The model in a variant's folder: Olive's packages do not name it."""
        try:
            names = [each.name for each in (self.root / folder).iterdir()]
        except OSError as error:
            raise _FileError(f"{folder} cannot be read ({error})") from None
        found = [name for name in names if name.endswith(".onnx")]
        if len(found) != 1:
            raise _SkipTargetError(
                "the manifest does not name its model file, and its folder has "
                + (f"{len(found)}: {', '.join(sorted(found))}" if found else "none")
            )
        return f"{folder}/{found[0]}"

    def _folders_of(self, variant: _Variant, model_file: str) -> set[str]:
        """The folders with the files that a session of ``variant`` reads."""
        folders = {variant.folder, posixpath.dirname(model_file)}
        for key in PATH_OPTIONS & variant.session_options.keys():
            named = variant.session_options[key]
            folders.add(posixpath.dirname(named) if key.endswith("file_path") else named)
        return {folder or "." for folder in folders}

    def _files_of(self, variant: _Variant, folders: set[str]) -> list[str]:
        """The recorded files that a session of ``variant`` may read."""
        key = variant.component, variant.target
        if key not in self._files_of_variants:
            models = {each.model_file for all_ in self.components.values() for each in all_}
            prepared = _join(variant.folder, PREPARED)
            self._files_of_variants[key] = [
                name
                for name in self.files
                if any(_is_below(name, folder) for folder in folders)
                and not _is_below(name, prepared)
                # Models that share weights are in one folder.
                and (name == variant.model_file or name not in models)
            ]
        return self._files_of_variants[key]

    def _on_disk(
        self,
        model_file: str,
        folders: set[str],
        names: list[str],
        stack: contextlib.ExitStack,
        verify: bool,
    ) -> Path:
        root = self.root
        if self.is_archive:
            root = self._unpack(names, model_file, stack, verify=verify)
        if self.is_confined:
            for path in _walk(root, folders, self._real_folders(root)):
                name = path.relative_to(root).as_posix() if verify else _MANIFEST
                if name != _MANIFEST and name not in self.files:
                    raise _FileError(f"{name} is not in the manifest, and cannot be verified")
        for name in names:
            # Copies from an archive were compared when they were made or found.
            _check_file(root / name, name, self.files[name], verify=verify and not self.is_archive)
        file: Path = root / model_file
        if not file.is_file():
            raise _FileError(f"{model_file} is missing in {self.location}")
        return file

    def _real_folders(self, root: Path) -> list[Path]:
        """Where files of the package may really be.

        Some installers make each file a link into a folder of theirs: then the manifest is there too.
        """
        return [root.resolve(), (root / _MANIFEST).resolve().parent]

    def _unpack(
        self, names: list[str], model_file: str, stack: contextlib.ExitStack, *, verify: bool
    ) -> Path:
        """A folder with copies of the recorded files ``names`` of an archive, or else of the model alone.

        It is in the user's cache, where the next start finds it. Where there is none, or where it cannot be
        written, it is a temporary folder, which ``stack`` removes.
        """
        import tempfile
        from pathlib import Path

        try:
            if names:
                return self._unpack_once(names, verify=verify)
        except (OSError, RuntimeError) as error:
            # RuntimeError: this user has no home. As a text: the error would keep the session alive.
            _log("info", "%s is copied into a temporary folder: %s", model_file, str(error))
        folder = tempfile.TemporaryDirectory(prefix="epcontext-", ignore_cleanup_errors=True)
        root = Path(stack.enter_context(folder))
        self._copy_out(names or [model_file], root)
        return root

    def _unpack_once(self, names: list[str], *, verify: bool) -> Path:
        """The folder in the user's cache with ``names``, named by their contents. It appears as a whole.

        Of several processes one copies, and the others wait. Raises OSError if the cache cannot be used.
        """
        import hashlib
        import json
        import tempfile
        from pathlib import Path

        content = json.dumps({name: self.files[name]["sha256"] for name in names}, sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()[:32]
        folder = _user_folder() / "unpacked"
        found = folder / key
        if not self._is_whole(found, names, verify=verify):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{key}.lock"):
                # Asked again: another process may have made it meanwhile.
                if not self._is_whole(found, names, verify=verify):
                    _remove(found)
                    new = tempfile.TemporaryDirectory(
                        prefix=".new-", dir=folder, ignore_cleanup_errors=True
                    )
                    with new as made:
                        self._copy_out(names, Path(made) / key)
                        (Path(made) / key).rename(found)
            with contextlib.suppress(OSError):
                # What another process opens at this moment was used a moment ago.
                _remove_oldest(folder, keep=key, unused_for=_DAY)
        # The folder may have become read-only.
        with contextlib.suppress(OSError):
            os.utime(found)
        return found

    def _is_whole(self, folder: Path, names: list[str], *, verify: bool) -> bool:
        try:
            for name in names:
                _check_file(folder / name, name, self.files[name], verify=verify)
        except _FileError:
            return False
        return True

    def _copy_out(self, names: list[str], folder: Path) -> None:
        """Copy files of an archive into ``folder``. Raises _FileError for one that is not as recorded."""
        import hashlib

        for name in names:
            target, digest = folder / name, hashlib.sha256()
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as copy:
                for chunk in self._chunks(name):
                    digest.update(chunk)
                    copy.write(chunk)
                copy.flush()
                os.fsync(copy.fileno())
            if name in self.files and digest.hexdigest() != self.files[name]["sha256"]:
                raise _changed(name)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """The contents of a file in an archive."""
        try:
            with (self.root / name).open("rb") as source:
                while chunk := source.read(1 << 20):
                    yield chunk
        except Exception as error:
            # Of any kind: archives raise their own errors.
            raise _FileError(f"{name} cannot be copied from {self.location} ({error})") from None


def _leaves(name: str) -> bool:
    """Whether ``name`` can lead out of its folder, on this system or on another one.

    Also where another system takes a part for a drive or for a parent folder, such as ``.. `` on Windows.
    """
    first, *_ = parts = name.replace("\\", "/").split("/")
    return not first or any(
        ntpath.splitdrive(part)[0] or (part.strip(". ") == "" and part not in ("", "."))
        for part in parts
    )


def _is_below(name: str, folder: str) -> bool:
    return folder == "." or name.startswith(f"{folder}/")


def _walk(root: Path, folders: set[str], allowed: Sequence[Path]) -> Iterator[Path]:
    """The files below ``folders`` of ``root``.

    Raises _FileError for a link to a place outside of the ``allowed`` folders.
    """
    for top in sorted(folders):
        for place, below, names in os.walk(root / top):
            folder = type(root)(place)
            # Python writes there what it has compiled.
            below[:] = [each for each in below if each != "__pycache__"]
            files = [folder / each for each in names]
            links = [
                each for each in (*files, *(folder / each for each in below)) if each.is_symlink()
            ]
            # The folder too: on Windows it has other ways to lead elsewhere.
            for path in (folder, *links):
                real = path.resolve()
                if not any(each == real or each in real.parents for each in allowed):
                    name = path.relative_to(root).as_posix()
                    raise _FileError(f"{name} is a link to a place outside of the package")
            yield from files


def _refuse_constant(name: str) -> None:
    # Python reads NaN and infinities, and other parsers do not.
    raise ValueError(f"{name} is not a number in JSON")


def _join(folder: str, name: str) -> str:
    # Only an installed package has absolute names, and on Windows they begin with a drive.
    return name if ntpath.isabs(name) else posixpath.normpath(posixpath.join(folder, name))


def _misfit(value: Any, form: Any) -> str | None:
    """Where ``value`` does not have the ``form``, and how, such as ``.ep must be a string``.

    None if it has. A form is a type, a tuple of choices, a list with the form of the items, or a dict.
    """
    if isinstance(form, tuple):
        problems = [_misfit(value, each) for each in form if each is not None]
        accepted = None in problems or (value is None and None in form)
        return None if accepted else problems[0]
    type_: Any = form if isinstance(form, type) else type(form)
    if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
        return " is missing" if value is None else f" must be {_JSON_TYPES[type_]}"
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(form, list):
        parts = [(f"[{index}]", item, form[0]) for index, item in enumerate(value)]
    elif isinstance(form, dict) and "*" in form:
        parts = [(f".{name}", item, form["*"]) for name, item in value.items()]
    elif isinstance(form, dict):
        parts = [(f".{name}", value.get(name), each) for name, each in form.items()]
    found = (f"{name}{problem}" for name, item, each in parts if (problem := _misfit(item, each)))
    return next(found, None)


def _changed(name: str) -> _FileError:
    return _FileError(f"{name} was changed: its sha256 differs from the recorded one")


def _check_file(file: Path, name: str, recorded: Mapping[str, Any], *, verify: bool) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise _FileError(f"{name} is missing") from None
    except (OSError, ValueError) as error:
        raise _FileError(f"{name} cannot be read ({error})") from None
    # An EP may crash on a truncated file.
    if size != recorded["size"]:
        raise _FileError(f"{name} has {size} bytes, and {recorded['size']} were recorded")
    if verify and _sha256(file) != recorded["sha256"]:
        raise _changed(name)


def _sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _package(folder: str | os.PathLike[str] | None) -> _Package:
    """The package in ``folder``, or the one that contains this module; read again when it changed."""
    from pathlib import Path

    is_archive = False
    try:
        root: Any = Path(__file__).parent if folder is None else Path(folder)
    except TypeError:
        raise LoadError(f"package must be the path of a folder, not {folder!r}") from None
    location = str(root)
    try:
        stat = (root / _MANIFEST).stat()
        stamp: Any = (stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError):
        stamp = None
        if folder is None and not root.is_dir():
            # This module is inside a zip archive.
            is_archive = True
            resources = importlib.import_module("importlib.resources")
            try:
                root = resources.files(__name__)
            except Exception as error:
                raise LoadError(f"{location} cannot be read ({error})") from None
    known = _packages.get(location)
    if known is None or known[0] != stamp or is_archive:
        known = _packages[location] = stamp, _Package(root, location, is_archive=is_archive)
    return known[1]


def _try_targets(
    package: _Package, name: str, target: str | None, request: _Request
) -> Iterator[tuple[Step, Any]]:
    """Yield a step for each target, with the session of the one that is opened and else None."""
    variants = _choose(package, name, target, request.shapes)
    if target is None and request.fallback is None:
        variants = [variant for variant in variants if not variant.is_source]
    if not variants:
        only = ", only its source model" if request.fallback is None else ""
        raise LoadError(f"the model {name!r} has no targets in {package.location}{only}")
    compiled = [each for each in variants if not each.is_source]
    # An editable install may have source models alone.
    if request.fallback == "jit" and compiled and not any(v.ours.get(PREPARED) for v in compiled):
        ours = f"the target {target!r}" if target is not None else "no target"
        raise LoadError(
            f"fallback='jit' needs the prepared model of {name!r}, and {ours} ships "
            f"{'none' if target is not None else 'one'}: set recompile = true on the target, and build "
            "the package again"
        )
    session, skipped = None, None
    for variant, opener in _attempts(variants, request):
        if session is not None:
            if opener is _open:
                yield Step(variant.target, Outcome.NOT_TRIED, None), None
            continue
        try:
            _check_shapes(package, variant, request.shapes)
            session, runs_on = opener(package, variant, request)
        except _SkipTargetError as error:
            step = Step(variant.target, Outcome.SKIPPED, str(error))
            # Without its device a target can be compiled as little as opened.
            if step != skipped:
                yield step, None
            skipped = step
        except Exception as error:
            # Of any kind: a device that has vanished makes onnxruntime raise even MemoryError.
            what = "" if isinstance(error, _FileError) else f"{type(error).__name__}: "
            when = "" if opener is _open else "compiling it on this machine: "
            yield Step(variant.target, Outcome.FAILED, f"{when}{what}{error}"), None
        else:
            _target_names[session] = variant.target
            _keep_alive(session, package, variant)
            yield Step(variant.target, Outcome.OPENED, runs_on), session


def _attempts(
    variants: list[_Variant], request: _Request
) -> Iterator[tuple[_Variant, Callable[..., Any]]]:
    """Each variant with the function that opens it; with "jit" also with the one that compiles it."""
    for variant in variants:
        yield variant, _open
        if request.fallback == "jit" and variant.ours.get(PREPARED):
            yield variant, _open_compiled_here


def _choose(
    package: _Package, name: str, target: str | None, shapes: Shapes | None
) -> list[_Variant]:
    """The variants of the model to try, one for each target, in order.

    Raises LoadError for a model or a target that the package does not have.
    """
    if not isinstance(name, str):
        raise LoadError(f"the name of a model must be a string, not {name!r}")
    if name in package.models:
        components = package.models[name]
    elif name in package.components:
        components = [name]
    else:
        raise LoadError(_unknown("model", name, list(package.models)))
    # All components of a model list their targets in the same order.
    targets = list(dict.fromkeys(v.target for each in components for v in package.components[each]))
    if target is not None and target not in targets:
        raise LoadError(_unknown("target", target, targets))
    chosen = []
    for each in targets if target is None else [target]:
        forms = [
            variant
            for component in components
            for variant in package.components[component]
            if variant.target == each
        ]
        if shapes is not None:
            _check_inputs(shapes, forms[0], name)
            forms = sorted(forms, key=_elements)
            forms = [form for form in forms if _fits(form, shapes)] or forms
        chosen.append(forms[0])
    return chosen


def _check_inputs(shapes: Shapes, variant: _Variant, name: str) -> None:
    known = variant.input_shapes
    for each, shape in shapes.items():
        if known and each not in known:
            raise LoadError(f"{name!r}: {_unknown('input', each, list(known))}")
        if known and len(shape) != len(known[each]):
            raise LoadError(
                f"the input {each!r} of {name!r} has {len(known[each])} dimensions, and shapes gives "
                f"{len(shape)}"
            )


def _fits(variant: _Variant, shapes: Shapes) -> bool:
    """Whether the variant's shapes are large enough in every dimension; open dimensions are."""
    return all(
        not isinstance(size, int) or size >= wanted
        for each, shape in shapes.items()
        for size, wanted in zip(variant.input_shapes.get(each, ()), shape, strict=False)
    )


def _elements(variant: _Variant) -> float:
    total = 0.0
    for shape in variant.input_shapes.values():
        elements = 1.0
        for size in shape:
            elements *= size if isinstance(size, int) else float("inf")
        total += elements
    return total


def _check_shapes(package: _Package, variant: _Variant, shapes: Shapes | None) -> None:
    """Raise _SkipTargetError if no form of the variant's target takes ``shapes``."""
    if shapes is None or _fits(variant, shapes):
        return
    siblings = next(each for each in package.models.values() if variant.component in each)
    forms = [
        each.input_shapes
        for component in siblings
        for each in package.components[component]
        if each.target == variant.target
    ]
    listed = (
        ", ".join(f"{name}: {_shape_text(form[name])}" for name in shapes if name in form)
        for form in forms
    )
    # The components of a model have the same source.
    text = "; ".join(dict.fromkeys(listed))
    raise _SkipTargetError(f"none of its shapes is large enough ({text})")


def _shape_text(shape: Sequence[int | str | None]) -> str:
    return " x ".join("?" if size is None else str(size) for size in shape)


def _keep_alive(session: Any, package: _Package, variant: _Variant) -> None:
    """Keep the earlier sessions of the variant's weight-sharing group alive as long as ``session``."""
    if sharing := variant.ours.get("sharing"):
        key = (package.location, sharing["group"], variant.target)
        with _groups_lock:
            group = _groups.setdefault(key, weakref.WeakSet())
            _earlier_sessions[session] = tuple(group)
            group.add(session)


def _unknown(what: str, name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(known) or 'none'}."


def _log(level: str, message: str, *arguments: object) -> None:
    # Imported late, as other modules here: importing this module costs an app almost nothing.
    import logging

    getattr(logging.getLogger(__name__), level)(message, *arguments, stacklevel=2)


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise _SkipTargetError(f"onnxruntime cannot be imported ({error})") from error
    return onnxruntime


def _open(package: _Package, variant: _Variant, request: _Request) -> tuple[Any, str]:
    """Open ``variant``; return the session, and a text that says what it runs on."""
    ort = _onnxruntime()
    if request.verify:
        package.verify_texts()
    with contextlib.ExitStack() as stack:
        file = package.on_disk(variant, stack, verify=request.verify)
        session, runs_on = _open_file(ort, package, variant, request, file)
        if package.is_archive:
            # A temporary folder is there as long as the session.
            weakref.finalize(session, stack.pop_all().close)
    return session, runs_on


def _readable(file: Path, encoding: str, reason: str) -> Path:
    """``file``, on Windows by a path of which ``encoding`` has all letters: its own, or its short one.

    Raises _SkipTargetError if there is none; ``reason``: why it is needed, and what to do.
    """
    if sys.platform != "win32":
        return file
    import ctypes

    short = ctypes.create_unicode_buffer(1 << 15)
    ctypes.windll.kernel32.GetShortPathNameW(str(file), short, len(short))
    for path in filter(None, (str(file), short.value)):
        with contextlib.suppress(UnicodeEncodeError):
            path.encode(encoding)
            return type(file)(path)
    raise _SkipTargetError(f"{reason}, or use another folder than {file}")


def _open_file(
    ort: Any, package: _Package, variant: _Variant, request: _Request, file: Path
) -> tuple[Any, str]:
    """Open the model ``file`` of ``variant``; return the session, and what it runs on."""
    if variant.ours.get("needs_code_page"):
        crash = f"{variant.ep} crashes where the path has letters outside the code page of Windows"
        file = _readable(file, "mbcs", f"{crash}; set embed = true for the target")
    wanted, built_for = _kinds_of_device(variant, request)
    options = request.session_options
    options = (options() if callable(options) else options) or ort.SessionOptions()
    _check_secrets(variant.ours.get("secrets") or (), request)
    provider_options = _provider_options(package, variant, request)
    session_options = _session_options(package, variant)
    constants = package.constants.get(variant.component)
    class_ = _session_with_constants(ort) if constants else ort.InferenceSession
    if _is_built_in(ort, variant):
        _add_session_options(options, session_options)
        providers = [(variant.ep, provider_options)]
        session = _with_providers(class_, file, options, providers)
        runs_on = f"{variant.ep} on {built_for}"
    else:
        with _ep_lock(ort):
            runs_on = _add_devices(ort, variant, wanted, options, provider_options)
            _add_session_options(options, session_options)
            session = class_(file, options, enable_fallback=0)
    if constants:
        # As arrays: `run_async` needs them until it is done.
        session.epcontext_constants = _arrays(constants)
    # If a library of the EP is missing, onnxruntime only logs it, and opens the session without the EP.
    found = session.get_providers()
    if variant.ep not in found and found[:1] == [CPU_EP]:
        raise _SkipTargetError(
            f"the session was opened without {variant.ep}; onnxruntime's log may name a missing library"
        )
    return session, runs_on


def _add_session_options(options: Any, session_options: Mapping[str, str]) -> None:
    # Not before its EP is found: a target that is skipped leaves the app's own options as they are.
    for key, value in session_options.items():
        options.add_session_config_entry(key, value)


def _session_options(package: _Package, variant: _Variant) -> dict[str, str]:
    """The variant's session options, with absolute paths for the files of the package."""
    paths = {
        key: str(package.root / value)
        for key, value in variant.session_options.items()
        if key in PATH_OPTIONS
    }
    others = {k: value for k, value in variant.session_options.items() if k not in paths}
    return {**paths, **_confined(package, variant, others, {})}


def _with_providers(class_: Any, file: Path, options: Any, providers: list[Any]) -> Any:
    if not getattr(options, "has_providers", bool)():
        return class_(file, options, providers=providers, enable_fallback=0)
    with warnings.catch_warnings():
        # The app's own options still have the EP of a target that failed: these providers replace it.
        warnings.filterwarnings("ignore", "Specified 'providers'")
        return class_(file, options, providers=providers, enable_fallback=0)


def _ep_lock(ort: Any) -> Any:
    """The lock for registering plugin EPs and for opening on them.

    There is one in the process, also for the loaders of other packages: some EPs crash when two threads
    open a session at the same moment.
    """
    return vars(ort).setdefault("_epcontext_lock", threading.Lock())


def _kinds_of_device(variant: _Variant, request: _Request) -> tuple[str, str]:
    """The kind of device that is wanted, and the kind that the target was built for."""
    built_for = variant.kind_of_device
    wanted = request.device or built_for
    if "any" not in (wanted, built_for) and wanted != built_for:
        raise _SkipTargetError(f"it is for the {built_for}, and device={wanted!r} was requested")
    return wanted, built_for


def _add_devices(
    ort: Any, variant: _Variant, wanted: str, options: Any, provider_options: dict[str, str]
) -> str:
    """Add the variant's EP to ``options``; return what a session will run on."""
    # Listed again each time: onnxruntime forgets the devices of a library that is unregistered.
    devices = _devices(ort, variant, wanted)
    _check_compatibility(devices, variant)
    policy = variant.settings.get("policy")
    if policy is None:
        # These devices are interchangeable, and a session takes one.
        options.add_provider_for_devices(devices[:1], provider_options)
        return f"{variant.ep} on {_kind(devices[0])}"
    # A policy takes no provider options. These keys are where onnxruntime itself keeps them.
    for name, value in provider_options.items():
        options.add_session_config_entry(f"ep.{devices[0].ep_name.lower()}.{name}", value)
    known = ort.OrtExecutionProviderDevicePolicy.__members__
    if (member := known.get(policy.replace("-", "_").upper())) is None:
        raise _SkipTargetError(f"onnxruntime {ort.__version__} does not know the policy {policy!r}")
    options.set_provider_selection_policy(member)
    return f"{variant.ep}, by the policy {policy}"


@functools.cache
def _session_with_constants(ort: Any) -> Any:
    """A session class that takes the inputs that the build froze, and checks their values.

    With it the source model, which still has these inputs, is called like the compiled ones.
    """
    import numpy as np

    class SessionWithConstants(ort.InferenceSession):  # type: ignore[misc]
        epcontext_constants: Mapping[str, Any] = {}

        def get_inputs(self) -> Any:
            inputs = super().get_inputs()
            return [each for each in inputs if each.name not in self.epcontext_constants]

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            return super().run(output_names, self._feed(input_feed), run_options)

        def run_async(
            self,
            output_names: Any,
            input_feed: Any,
            callback: Any,
            user_data: Any,
            run_options: Any = None,
        ) -> Any:
            feed = self._feed(input_feed)
            return super().run_async(output_names, feed, callback, user_data, run_options)

        def _feed(self, given: Mapping[str, Any]) -> dict[str, Any]:
            feed = dict(given)
            needed = {each.name for each in super().get_inputs()}
            for name, value in self.epcontext_constants.items():
                if name in feed and not np.array_equal(np.ravel(feed.pop(name)), value.ravel()):
                    raise ValueError(
                        f"the input {name!r} was frozen to {value.tolist()!r} when the model was "
                        "compiled, and has another value here"
                    )
                if name in needed:
                    feed[name] = value
            return feed

    return SessionWithConstants


def _arrays(constants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``constants`` as arrays; one number has the rank that the model takes."""
    import numpy as np

    arrays = {}
    for name, each in constants.items():
        dtype = "object" if each["dtype"] == "string" else each["dtype"]
        try:
            array = np.asarray(each.get("value"), np.dtype(dtype))
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"the constant {name!r} in the manifest is not of the type {dtype} ({error})"
            raise _FileError(reason) from error
        if array.ndim != len(each["shape"]) and array.size == 1:
            array = array.reshape([1] * len(each["shape"]))
        arrays[name] = array
    return arrays


def _provider_options(package: _Package, variant: _Variant, request: _Request) -> dict[str, str]:
    """The variant's provider options, and those of the app unless it is the source."""
    given = {} if variant.is_source else request.provider_options
    result = _confined(package, variant, variant.provider_options, given)
    for name, value in (variant.ours.get("load_options") or {}).items():
        if name in _LIBRARY_OPTIONS and name not in given:
            raise _elsewhere(name, value)
        try:
            result[name] = _expand_user_cache(value)
        except RuntimeError as error:
            # No home folder, as in a container that runs as any user. A cache only makes starts faster.
            _log(
                "warning", "%s is left out, because this user has no cache folder: %s", name, error
            )
    for name, more in given.items():
        result[name] = str(int(more) if isinstance(more, bool) else more)
    return result


def _check_secrets(names: Sequence[str], request: _Request) -> None:
    """Raise _SkipTargetError if the app does not give these options, with which a target was compiled."""
    if missing := set(names) - request.provider_options.keys():
        example = ", ".join(f"{name!r}: ..." for name in sorted(missing))
        raise _SkipTargetError(
            "it was compiled with a secret, which the app has to give: "
            f"load(..., provider_options={{{example}}})"
        )


def _confined(
    package: _Package,
    variant: _Variant,
    options: Mapping[str, str],
    given: Mapping[str, object],
) -> dict[str, str]:
    """``options`` of the manifest, with absolute paths for the files of the package.

    In place of one that names a file elsewhere is that of the app, in ``given``. Raises _SkipTargetError if
    the app gives none.
    """
    folder = None if package.is_archive else package.root / variant.folder
    result = {}
    for name, value in options.items():
        is_trusted = not package.is_confined and name in _LIBRARY_OPTIONS
        inside = value if is_trusted else confined_option(folder, name, value)
        if inside is None and name not in given:
            raise _elsewhere(name, value)
        result[name] = str(given[name]) if inside is None else inside
    return result


def _elsewhere(option: str, value: str) -> _SkipTargetError:
    what = "library" if option in _LIBRARY_OPTIONS else "file"
    return _SkipTargetError(
        f"{option} names a {what} outside of the package ({value!r}), which only the app may give"
        # The app's session options have other names.
        + ("" if "." in option else f": load(..., provider_options={{{option!r}: ...}})")
    )


def confined_option(folder: Path | None, option: str, value: str) -> str | None:
    """The value to pass on for an ``option`` of a manifest; None if it names a file or folder elsewhere.

    A file in the variant's ``folder`` gets its absolute path. ``folder`` is None where it is not on disk. A
    library may also have a plain name, which the EP finds itself.
    """
    # As a session option it is called ep.<EP>.<option>.
    name = option.rpartition(".")[2].casefold()
    if name in _GRAPH_OPTIONS or not value:
        return value
    if name in _LIBRARY_OPTIONS:
        if not set(value) & set("/\\:;,"):
            return value
        is_inside = not set(value) & set(":;,") and not _leaves(value)
    elif name in _FILE_OPTIONS:
        is_inside = not _leaves(value) and folder is not None and _is_file_in(folder, value)
    else:
        return None if _leaves(value) or _has_file_in_json(value) else value
    return str(folder / value) if is_inside and folder is not None else None


def _is_file_in(folder: Path, name: str) -> bool:
    """Whether ``folder`` has a file or folder ``name``, which is no link to a place elsewhere."""
    try:
        real = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return False
    return folder.resolve() in (real, *real.parents)


def _has_file_in_json(value: str) -> bool:
    """Whether ``value`` is JSON with an option that names a file, or JSON that cannot be read."""
    import json

    if value.lstrip("\ufeff \t\r\n")[:1] not in ("{", "["):
        return False
    # Of all objects, and of each the keys that are there twice too.
    pairs: list[tuple[str, Any]] = []
    try:
        json.loads(value, object_pairs_hook=pairs.extend)
    except (ValueError, RecursionError):
        return True
    return any(
        confined_option(None, name, each) is None for name, each in pairs if isinstance(each, str)
    )


def _is_built_in(ort: Any, variant: _Variant) -> bool:
    """Whether the EP is part of onnxruntime's own distribution.

    Raises _SkipTargetError for a built-in EP that this distribution does not contain.
    """
    if variant.ours.get("plugin"):
        return False
    offered = [each for each in _ep_devices(ort) if each.ep_name == variant.ep]
    # onnxruntime also counts a registered library among its own.
    if any("library_path" in each.ep_metadata for each in offered):
        return False
    if variant.ep in ort.get_available_providers():
        return True
    if offered or (not variant.ours and variant.ep in _KNOWN_PLUGINS):
        return False
    raise _SkipTargetError(f"this onnxruntime ({ort.__version__}) does not contain {variant.ep}")


def _user_folder() -> Path:
    """The app's own folder in the user's cache folder."""
    from pathlib import Path

    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / __name__.split(".")[0]


def _expand_user_cache(value: str) -> str:
    """``value``, a folder, which is created, with ``{user-cache}`` replaced by the app's own."""
    from pathlib import Path

    if not is_in_user_cache(value):
        raise _FileError(f"the manifest names a folder outside of the user's cache: {value!r}")
    folder = Path(f"{_user_folder()}{value.removeprefix(USER_CACHE)}")
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def is_in_user_cache(value: str) -> bool:
    """Whether ``value`` is `USER_CACHE`, or a folder in it."""
    rest = value.removeprefix(USER_CACHE)
    return rest != value and rest[:1] in ("", "/", "\\") and not _leaves(f".{rest}")


def _kind(device: Any) -> str:
    return str(device.device.type.name).lower()


def _devices(ort: Any, variant: _Variant, wanted: str) -> list[Any]:
    """The devices that the target can run on, best first; ``wanted`` is a kind of device or "any".

    The caller holds `_ep_lock`.
    """
    kind, wanted_facts = variant.kind_of_device, variant.settings.get("device_filter") or {}
    offered = [each for each in _offered(ort, variant) if _passes(each, wanted_facts)]
    if wanted == "any":
        fitting = [each for each in offered if _kind(each) == kind]
        if not fitting and variant.ours.get("needs_device"):
            raise _SkipTargetError(f"it needs a real {kind}, not a simulated one")
        fitting = fitting or offered
    else:
        fitting = [each for each in offered if _kind(each) == wanted]
    if not fitting:
        kinds = ", ".join(sorted({_kind(each) for each in offered}))
        raise _SkipTargetError(
            f"{variant.ep} finds no {'device' if wanted == 'any' else wanted}"
            + (f", only {kinds}" if kinds else " on this machine")
            + (
                " (device='any' accepts it)"
                if kinds and not variant.ours.get("needs_device")
                else ""
            )
        )
    return fitting


def _check_compatibility(devices: list[Any], variant: _Variant) -> None:
    """Raise _SkipTargetError if the EP says that it cannot run what was compiled.

    Python sessions do not compare the compatibility string, so it is asked here; but only of EPs for
    which that is known to be safe: QNN crashes when it is asked after a session was closed.
    """
    if not variant.compatibility or variant.ep not in _SAFE_TO_ASK:
        return
    try:
        from onnxruntime.capi._pybind_state import get_model_compatibility_for_ep_devices
    except ImportError:
        return
    try:
        answer = get_model_compatibility_for_ep_devices(devices[:1], variant.compatibility).name
    except Exception as error:
        _log("debug", "%s gives no answer on compatibility: %s", variant.ep, error)
        return
    if answer == "EP_UNSUPPORTED":
        raise _SkipTargetError(
            f"{variant.ep} on this machine is not compatible with what was compiled "
            f"({variant.compatibility})"
        )


def _passes(device: Any, wanted: Mapping[str, str]) -> bool:
    """Whether ``device`` has no known property that differs from ``wanted``; unknown ones pass."""
    if not wanted:
        return True
    facts = {
        **dict(device.device.metadata),
        **dict(device.ep_metadata),
        "vendor": device.device.vendor,
        "vendor-id": str(device.device.vendor_id),
    }
    return all(
        facts.get(name, value).casefold() == value.casefold() for name, value in wanted.items()
    )


def _ep_devices(ort: Any) -> list[Any]:
    devices: list[Any] = ort.get_ep_devices() if hasattr(ort, "get_ep_devices") else []
    return devices


def _offered(ort: Any, variant: _Variant) -> list[Any]:
    """The devices of the variant's EP. Its library is registered if needed, once per process.

    The caller holds `_ep_lock`.
    """
    ep = variant.ep
    if not hasattr(ort, "get_ep_devices"):
        raise _SkipTargetError(f"onnxruntime {ort.__version__} is too old for {ep}")
    offered = _of_ep(ort, ep, None)
    if offered:
        return offered
    plugin = variant.ours.get("plugin") or {
        "module": _KNOWN_PLUGINS.get(ep, ""),
        "package": _KNOWN_PLUGINS.get(ep, "").replace("_", "-"),
        "registration_name": ep,
    }
    if not plugin["module"]:
        raise _SkipTargetError(
            f"{ep} is not registered; the app has to call "
            "onnxruntime.register_execution_provider_library first"
        )
    try:
        library = str(importlib.import_module(plugin["module"]).get_library_path())
    except ImportError as error:
        raise _SkipTargetError(f"{plugin['package']} is not installed ({error})") from error
    except Exception as error:
        reason = f"{plugin['package']} names no library ({type(error).__name__}: {error})"
        raise _SkipTargetError(reason) from error
    # The app may have registered the library under another name, which some EPs take as their own.
    offered = _of_ep(ort, ep, library)
    if offered:
        return offered
    try:
        ort.register_execution_provider_library(plugin["registration_name"], library)
    except Exception as error:
        # The app, or another package's loader, may have registered it at the same moment.
        offered = _of_ep(ort, ep, library)
        if offered or "already registered" in str(error):
            return offered
        raise _SkipTargetError(
            f"the library of {plugin['package']} cannot be loaded ({error})"
        ) from error
    return _of_ep(ort, ep, library)


def _register_ready() -> None:
    """Register, once in a process, the EPs that Windows ML's catalogue has on this machine."""
    try:
        ort, catalogue = _onnxruntime(), importlib.import_module("windowsml")
        with _ep_lock(ort):
            # Kept: with some drivers it crashes when it is closed.
            if "_epcontext_catalog" not in vars(ort):
                vars(ort)["_epcontext_catalog"] = found = catalogue.EpCatalog()
                for each in found.find_all_providers():
                    if each.ready_state.name == "Ready" and not _of_ep(ort, each.name, None):
                        with contextlib.suppress(Exception):
                            # What fails is skipped with its reason: its EP is not registered.
                            ort.register_execution_provider_library(each.name, each.library_path)
    except Exception as error:
        _log("info", "the catalogue of Windows ML cannot be used (%s)", error)


def _of_ep(ort: Any, ep: str, library: str | None) -> list[Any]:
    """The devices of ``ep``, or else those that the file ``library`` offers under another name."""
    devices = _ep_devices(ort)
    return [each for each in devices if each.ep_name == ep] or [
        each
        for each in devices
        if library and _same_path(each.ep_metadata.get("library_path", ""), library)
    ]


def _same_path(first: str, second: str) -> bool:
    return os.path.normcase(os.path.realpath(first)) == os.path.normcase(os.path.realpath(second))


def _open_compiled_here(package: _Package, variant: _Variant, request: _Request) -> tuple[Any, str]:
    """`_open`, after the prepared model was compiled on this machine, once for its EP and driver."""
    ort = _onnxruntime()
    if request.verify:
        package.verify_texts()
    # It is that of the context that was shipped.
    variant = variant._replace(compatibility="")
    wanted, _ = _kinds_of_device(variant, request)
    _check_secrets(variant.ours.get("secrets") or (), request)
    if not hasattr(ort, "ModelCompiler"):
        raise _SkipTargetError(f"onnxruntime {ort.__version__} cannot compile models")
    with _ep_lock(ort):
        key = _key_of_compiled(ort, package, variant, _devices(ort, variant, wanted)[0])
    folder = _user_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / key / posixpath.basename(variant.model_file)
    with _locked(folder / f"{key}.lock"):
        try:
            _check_record(file.parent, verify=request.verify)
            session, runs_on = _open_file(ort, package, variant, request, file)
        except _SkipTargetError:
            raise
        except Exception as error:
            if file.parent.exists():
                _log("warning", "%s cannot be opened any more: %s", file, error)
                _remove(file.parent)
            _compile(ort, package, variant, request, wanted, file)
            session, runs_on = _open_file(ort, package, variant, request, file)
    # The folder may have become read-only.
    with contextlib.suppress(OSError):
        os.utime(file.parent)
        _remove_oldest(folder, keep=key)
    return session, f"{runs_on}, compiled on this machine"


def _check_record(folder: Path, *, verify: bool) -> None:
    """Raise an exception if a file of a context that was compiled here is missing or damaged."""
    import json

    record = json.loads((folder / _RECORD).read_bytes())
    if problem := _misfit(record, {"*": {"size": int, "sha256": str}}):
        raise _FileError(f"{_RECORD}{problem}")
    for name, recorded in record.items():
        if _leaves(name):
            raise _FileError(f"{_RECORD} names a file elsewhere: {name!r}")
        _check_file(folder / name, name, recorded, verify=verify)
    for path in _walk(folder, {"."}, [folder.resolve()]):
        name = path.relative_to(folder).as_posix()
        if verify and name != _RECORD and name not in record:
            raise _FileError(f"{name} is not in {_RECORD}")


def _key_of_compiled(ort: Any, package: _Package, variant: _Variant, device: Any) -> str:
    """The name of what is compiled: the prepared model, its settings, and all that is installed."""
    import hashlib
    import json
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    installed: Any = None
    # Some libraries have no package, and Python refuses an empty name with a ValueError.
    with contextlib.suppress(PackageNotFoundError, ValueError):
        installed = version((variant.ours.get("plugin") or {}).get("package", ""))
    facts = {**dict(device.ep_metadata), **dict(device.device.metadata)}
    library = facts.pop("library_path", None)
    for name in _VOLATILE_FACTS:
        facts.pop(name, None)
    # The app may have registered a library that no package contains.
    with contextlib.suppress(OSError, TypeError):
        stat = Path(library).stat()
        # A frozen app that is one file unpacks its libraries at each start.
        time = None if getattr(sys, "frozen", False) else stat.st_mtime_ns
        installed = [installed, stat.st_size, time]
    content = {
        "model": {n: package.files[n]["sha256"] for n in package.prepared_files(variant)},
        "settings": variant.settings,
        "onnxruntime": ort.__version__,
        "ep": installed,
        "device": [device.device.vendor_id, device.device.device_id, sorted(facts.items())],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _compile(
    ort: Any, package: _Package, variant: _Variant, request: _Request, wanted: str, file: Path
) -> None:
    """Compile the prepared model of ``variant`` into ``file``, in a folder that appears as a whole."""
    import json
    import tempfile

    settings = variant.settings
    compiled_with: dict[str, str] = settings.get("provider_options") or {}
    # Of a secret the manifest only has the name, and that of a variable of the build.
    secrets = [name for name, value in compiled_with.items() if value.startswith("{env:")]
    _check_secrets(secrets, request)
    others = {name: value for name, value in compiled_with.items() if name not in secrets}
    provider_options = _confined(package, variant, others, request.provider_options)
    provider_options.update({name: str(request.provider_options[name]) for name in secrets})
    options = ort.SessionOptions()
    session_options = settings.get("session_options") or {}
    for key, value in _confined(package, variant, session_options, {}).items():
        options.add_session_config_entry(key, value)
    level = {"none": "DISABLE_ALL", "basic": "ENABLE_BASIC", "extended": "ENABLE_EXTENDED"}.get(
        settings.get("optimization") or "basic", "ENABLE_ALL"
    )
    with contextlib.ExitStack() as stack:
        prepared = package.prepared_on_disk(variant, stack)
        model, target = variant.component, variant.target
        _log("warning", "%s is compiled for %s on this machine, once", model, target)
        parent = file.parent.parent
        made = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=".new-", dir=parent, ignore_cleanup_errors=True)
        )
        result = parent / made / file.parent.name
        result.mkdir()
        advice = "onnxruntime compiles only where the path has no letters outside ASCII; rename it"
        with _ep_lock(ort):
            # Listed again: this process may have waited for another one that compiled, and failed.
            devices = _devices(ort, variant, wanted)
            options.add_provider_for_devices(devices[:1], provider_options)
            compiler = ort.ModelCompiler(
                options,
                str(_readable(prepared, "ascii", advice)),
                embed_compiled_data_into_model=bool(settings.get("embed")),
                flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
                graph_optimization_level=getattr(ort.GraphOptimizationLevel, f"ORT_{level}"),
            )
            compiler.compile_to_file(str(_readable(result, "ascii", advice) / file.name))
        record = {
            each.name: {"size": each.stat().st_size, "sha256": _sha256(each)}
            for each in result.iterdir()
        }
        (result / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        result.rename(file.parent)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold ``file`` locked: of several processes one compiles, and the others wait for it.

    The system unlocks it when a process ends in any way.
    """
    with file.open("ab") as opened:
        if sys.platform == "win32":
            import msvcrt
            import time

            while True:
                # The mode that waits gives up after ten seconds, and a compiler may take minutes.
                with contextlib.suppress(OSError):
                    msvcrt.locking(opened.fileno(), msvcrt.LK_NBLCK, 1)
                    break
                time.sleep(0.1)
            try:
                yield
            finally:
                msvcrt.locking(opened.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX)
            yield


def _remove_oldest(folder: Path, keep: str, unused_for: float = 0.0) -> None:
    """Remove what was unused for the longest time, beyond `USER_CACHE_LIMIT` bytes.

    What was used in the last ``unused_for`` seconds is kept too.
    """
    import shutil
    import time

    contexts = []
    for each in folder.iterdir():
        # Another process may remove it meanwhile.
        with contextlib.suppress(OSError):
            used = each.stat().st_mtime
            if each.name.startswith("."):
                # It belongs to a process that compiles or copies, or that was killed long ago.
                if used < time.time() - _DAY:
                    shutil.rmtree(each, ignore_errors=True)
            elif each.is_dir():
                size = sum(file.stat().st_size for file in each.rglob("*"))
                contexts.append((each.name == keep, used, size, each))
    total = 0
    for is_kept, used, size, each in sorted(contexts, reverse=True):
        total += size
        if total > USER_CACHE_LIMIT and not is_kept and used <= time.time() - unused_for:
            _remove(each)


def _remove(folder: Path) -> None:
    import shutil

    # Renamed first: another process finds all of it or nothing. On Windows one that is open stays.
    trash = folder.with_name(f".old-{folder.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

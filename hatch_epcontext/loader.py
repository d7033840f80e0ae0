# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Opens precompiled ONNX models, which hatch-epcontext has put into this package.

A copy of ``hatch_epcontext/loader.py`` in hatch-epcontext (https://github.com/hatch-epcontext/hatch-epcontext)
under the MIT licence; the version is in ``manifest.json``. It needs Python 3.10, onnxruntime and numpy, and
trusts the files beside it, as any module does; ``verify=True`` finds those that were changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

# Other modules are imported where they are needed: importing this one costs an app almost nothing.
if TYPE_CHECKING:
    from pathlib import Path

    from onnxruntime import InferenceSession, SessionOptions

P = ParamSpec("P")
T = TypeVar("T")
Device = Literal["npu", "gpu", "cpu", "any"]
Folder = str | os.PathLike[str]
Shapes = Mapping[str, Sequence[int]]

SOURCE = "source"  # The name of the last target, which is the source model on the CPU.
USER_CACHE = "{user-cache}"  # In an option: the app's own folder inside the user's cache folder.
METADATA = "hatch-epcontext"  # The key of our part of ``additional_metadata`` in the manifest.
OPTION_FILE = "{file}"  # In an option: the folder of files that options name.
OPTION_FILES = "files"  # The name of that folder, in that of the target.
PREPARED = "prepared"  # The folder of the prepared model in that of its target, and its key.
CPU_EP = "CPUExecutionProvider"

MANIFEST = "manifest.json"
_CHANGED = "was changed: its sha256 differs from the recorded one"

# What is read of a variant in a companion that is not installed.
_ELSEWHERE: dict[str, Any] = {
    "variant_directory": "elsewhere",
    "ep": "",
    "executor_info": {"ort": {"model_file": "elsewhere"}},
}

_LOCK = "_epcontext_lock"  # The attribute of onnxruntime with the lock of this process.
# EPs with libraries of CUDA, which pip installs where the system's loader does not look.
_CUDA_EPS = {"CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider"}

_used_options: weakref.WeakSet[Any] = weakref.WeakSet()
_groups: dict[tuple[str, str, str], weakref.WeakSet[Any]] = {}


class LoadError(RuntimeError):
    """No session could be opened, or a file is damaged. ``attempts``: what became of each target."""

    def __init__(self, message: str, attempts: Sequence[TargetAttempt] = ()) -> None:
        super().__init__("\n  ".join((message, *map(str, attempts))))
        self.attempts = attempts


class Outcome(str, Enum):
    """The outcome of trying a target. Each member equals its text: ``Outcome.OPENED == "opened"``."""

    OPENED = "opened"
    SKIPPED = "skipped"  # This machine cannot or should not run the target.
    FAILED = "failed"  # onnxruntime raised an error, or a file is missing or damaged.
    NOT_NEEDED = "not needed"  # An earlier target was opened.


class TargetAttempt(NamedTuple):
    """One target, its outcome, and the reason for it; for an opened target, what it runs on."""

    target: str
    outcome: Outcome
    reason: str | None = None

    def __str__(self) -> str:
        # `.value`, because Python 3.12 changed how members of such an Enum are formatted.
        text = f"{self.target}: {self.outcome.value}"
        return f"{text}, {self.reason}" if self.reason else text


class SkipTargetError(Exception):
    """This machine cannot or should not run a target."""


def models(package: Folder | None = None) -> list[str]:
    """The names of the models in this package, or in the package in the folder ``package``."""
    return list(_package(package).models)


def load(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    shapes: Shapes | None = None,
    fallback: bool = True,
    recompile: bool | Literal["background"] = False,
    verify: bool = False,
    package: Folder | None = None,
    session_options: SessionOptions | Callable[[], SessionOptions] | None = None,
    provider_options: Mapping[str, object] | None = None,
    fallback_providers: Sequence[Any] | None = None,
    windows_ml: bool = False,
    progress: Callable[[str, float | None], object] | None = None,
) -> InferenceSession:
    """Open the model ``name`` on the first target that this machine can run.

    ``target``: only this target ("source" for the source model on the CPU, if it is shipped).
    ``device``: only targets on a device of this kind; "any" accepts one that only simulates the target's.
    ``shapes``: the shapes of the app's inputs. Of several sizes the smallest that is large enough is opened,
    or a target with open shapes; ``shapes_of`` returns the shapes to pad to. Without it, the first listed.
    ``fallback``: whether the source model may be opened, last and on the CPU. ``recompile``: if a target that
    has ``recompile = true`` does not open, compile it on this machine, once; "background" opens the next one
    until then. ``progress`` gets texts while it waits for that, and the share that is done or None.
    ``verify``: compare the manifest and all files beside the model with their recorded sha256, and open no
    model beside files that the manifest does not list.
    ``package``: the folder of another package that hatch-epcontext wrote. Trust it as you trust code.
    ``session_options``: the app's own, only for this call, to which those of the target are added; or a
    function that creates them, for each target that is opened.
    ``provider_options``: more options for all targets except the source model.
    ``fallback_providers``: the providers of the source model, and of targets of the CPU unless this is asked
    for, as ``InferenceSession`` takes them; those that this onnxruntime lacks are left out.
    ``windows_ml``: first register the EPs that the package windowsml has ready on this machine, if any.

    Raises LoadError, whose ``attempts`` have the reasons, when no target could be opened, and when the
    package is damaged, or has no such model, target or input.
    """
    arguments = (target, device, shapes, fallback, recompile, verify, package)
    more = (session_options, provider_options, fallback_providers, windows_ml, progress)
    candidates, request = _resolve_request(name, Request(*arguments, *more))
    attempts: list[TargetAttempt] = []
    session = None
    for variants, method in candidates:
        if session is not None:
            if all(attempt.target != variants[0].target for attempt in attempts):
                attempts.append(TargetAttempt(variants[0].target, Outcome.NOT_NEEDED))
            continue
        attempt, session = open_variant(method, variants, request)
        # Without its device a target can be compiled as little as opened.
        if attempt not in attempts:
            log("warning" if attempt.outcome is Outcome.FAILED else "info", f"{name} on {attempt}")
            attempts.append(attempt)
    if session is None:
        raise LoadError(f"the model {name!r} cannot be opened on this machine:", attempts)
    session.epcontext_attempts = attempts
    return session


def _resolve_request(
    name: str, request: Request
) -> tuple[list[tuple[list[Variant], Any]], Request]:
    """The candidates to try, in order, and the request with what wins over the arguments of `load`."""
    if request.windows_ml:
        _register_ready()
    forced, shapes = os.environ.get("EPCONTEXT_DEVICE"), request.shapes or {}
    device = forced or request.device
    if device not in (None, *get_args(Device)):
        where = "EPCONTEXT_DEVICE" if forced else "device"
        raise LoadError(f"{where} must be one of {get_args(Device)}, not {device!r}")
    if not callable(own := request.session_options) and own is not None:
        if own in _used_options:
            # The execution provider of an earlier session would open no second one.
            raise LoadError("session_options were used before: pass a function that creates them")
        _used_options.add(own)
    shapes = {name: tuple(map(operator.index, shape)) for name, shape in shapes.items()}
    options = request.provider_options or {}
    request = request._replace(device=device, shapes=shapes, provider_options=options)
    read = _package(request.package, request.verify)
    if override := os.environ.get("EPCONTEXT_TARGET"):
        if any(override in (v.target, *v.configured) for v in read.models.get(name, ())):
            request = request._replace(target=override)
        else:
            log("warning", f"{name} has no target {override!r} (EPCONTEXT_TARGET)")
    return _list_candidates(read, name, request), request


def _typed_as(_: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    return lambda function: function


@_typed_as(load)
def runner(name: str, **arguments: Any) -> Any:
    """Open the model as `load` does with these arguments, to run it with each of its sizes and any batch.

    It has ``run``, ``get_inputs`` and ``get_outputs`` of a session, and ``explain``. ``session_options`` must
    be a function if several sizes run. Raises LoadError as `load` does.
    """
    candidates, request = _resolve_request(name, Request(**arguments))
    return beside("_runner").Runner(sys.modules[__name__], name, candidates, request)


@_typed_as(load)
def explain(name: str, **arguments: Any) -> list[TargetAttempt]:
    """What `load` does with each target, and why, with the same arguments. It opens a session to find out."""
    try:
        return list(load(name, **arguments).epcontext_attempts)
    except LoadError as error:
        if not error.attempts:
            raise
        return list(error.attempts)


@_typed_as(load)
def check(name: str, **arguments: Any) -> list[Any]:
    """What `load` does with each target: ``target``, ``answer`` and ``reason``. It opens no session."""
    request = Request(**arguments)
    candidates, resolved = _resolve_request(name, request._replace(session_options=None))
    resolved = resolved._replace(session_options=request.session_options)
    expectations: list[Any] = beside("_check").expect(sys.modules[__name__], candidates, resolved)
    return expectations


def target_of(session: InferenceSession) -> str:
    """The target on which `load` opened ``session``. Raises KeyError for other sessions."""
    return str(vars(session)["epcontext_target"])


def shapes_of(session: InferenceSession) -> dict[str, tuple[int | str | None, ...]]:
    """The shape of each input of ``session``: sizes to pad to, or the name of an open dimension."""
    return {value.name: tuple(value.shape) for value in session.get_inputs()}


@contextlib.contextmanager
def path(name: str, target: str | None = None, *, package: Folder | None = None) -> Iterator[Path]:
    """The path of a model file, with its sidecars beside it, for tools that open it themselves.

    ``target`` is the first of the model's targets by default. Raises LoadError as `load` does.
    """
    candidates = _list_candidates(_package(package), name, Request(target, shapes={}))
    firsts = (variants[0] for variants, _ in candidates)
    variant = min(firsts, key=lambda first: first.problem is not None)
    if variant.problem is not None:
        raise LoadError(f"{name!r} on {variant.target}: {variant.problem}")
    yield variant.package.on_disk(variant)


class Request(NamedTuple):
    """The arguments of `load`, without the model's name."""

    target: str | None = None
    device: str | None = None
    shapes: Any = None
    fallback: bool = True
    recompile: bool | str = False
    verify: bool = False
    package: Folder | None = None
    session_options: Any = None
    provider_options: Any = None
    fallback_providers: Sequence[Any] | None = None
    windows_ml: bool = False
    progress: Any = None


class Package:
    """A package that was read, from a folder, or its stand-in inside a zip archive.

    ``models`` has the variants of each model, in the order to try. Raises LoadError for a bad manifest.
    """

    def __init__(self, root: Any) -> None:
        import json

        self.root, self.models = root, dict[str, list[Variant]]()
        try:
            if not (root / MANIFEST).is_file():
                # Reading a pipe would never end.
                raise ValueError("it is missing, or no regular file")  # noqa: TRY301
            self.text: bytes = (root / MANIFEST).read_bytes()
            manifest = json.loads(self.text)
            version = get(manifest, "schema_version", str)
            if not version.startswith("1."):
                raise ValueError(f"it has the schema {version}, and this loader reads 1.x")  # noqa: TRY301
            is_installed = get(manifest, "layout", str, "") == "installed"
            # What is in an archive, which is no path, is copied into the user's cache.
            self._is_portable = not is_installed or not isinstance(root, os.PathLike)
            about = _about(manifest)
            # The requirement that installs each companion, by its import package.
            self.companions = texts(about, "companions")
            self.files: dict[str, dict[str, Any]] = get(about, "files", dict, {})
            for name, recorded in self.files.items():
                self.inside(name)
                get(recorded, "size", int), get(recorded, "sha256", str)
            self._checksum = get(about, "manifest_sha256", str, "")
            for component, body in get(manifest, "components", dict).items():
                about = _about(body)
                variants = self.models.setdefault(get(about, "model", str, component), [])
                own, modules = get(body, "variants", dict), texts(about, "modules")
                for target in dict.fromkeys((*modules, *own)):
                    # In an editable install the source replaces the CPU's targets.
                    is_source = texts(about, "targets").get(target) == CPU_EP
                    if target in own or (modules[target] and not is_source):
                        entry = own.get(target, _ELSEWHERE)
                        variants.append(Variant(self, component, target, entry, about))
        except Exception as error:
            # Of any kind: archives raise their own errors.
            raise LoadError(f"{root / MANIFEST} cannot be read ({error})") from None

    def inside(self, name: str) -> str:
        """``name``, which must not leave a package that can be moved, whatever the system."""
        if not name or (self._is_portable and not is_plain(name)):
            raise ValueError(f"{name!r} is outside of the package")
        return name

    def on_disk(self, variant: Variant, *, verify: bool = False) -> Path:
        """The model file of ``variant``. Raises LoadError if a file is missing or has another size.

        With ``verify`` also if a sha256 differs, or a file is not recorded.
        """
        files = self.files_of(variant)
        if verify:
            self.verify()
            for path in (self.root / variant.folder).rglob("*") if self._is_portable else ():
                name = path.relative_to(self.root).as_posix()
                if name not in self.files and path.is_file() and "__pycache__" not in path.parts:
                    raise LoadError(f"{name} is not in the manifest, and cannot be verified")
        file: Path = self.root / variant.file
        if reason := damage(self.root, files, verify=verify):
            raise LoadError(reason)
        # `Path.is_file` raises an error for a name that is too long.
        if not os.path.isfile(file):  # noqa: PTH113
            raise LoadError(f"{variant.file} is missing in {self.root}")
        return file

    def verify(self) -> None:
        """Raise LoadError if the manifest or a module differs from what is recorded."""
        import hashlib

        # A file cannot contain its own sha256: that of the manifest is with zeros instead of it.
        text = self.text.replace(self._checksum.encode() or b"?", b"0" * 64)
        if hashlib.sha256(text).hexdigest() != self._checksum:
            raise LoadError(f"{MANIFEST} {_CHANGED}")
        # Frozen apps have their modules elsewhere.
        names = [n for n in self.files if "/" not in n and (self.root / n).is_file()]
        if reason := damage(self.root, {name: self.files[name] for name in names}, verify=True):
            raise LoadError(reason)

    def files_of(self, variant: Variant) -> dict[str, dict[str, Any]]:
        """What is recorded of the files that a session of ``variant`` reads, by their names."""
        folder, prepared = f"{variant.folder}/", f"{variant.folder}/{PREPARED}/"
        # Models that share weights are in one folder.
        every = {other.file for model in self.models.values() for other in model}
        others = every - {variant.file}
        inside = {name for name in self.files if name.startswith(folder)} - others
        return {n: self.files[n] for n in sorted(inside) if not n.startswith(prepared)}


class Variant:
    """A model compiled for a target, or its source; ``folder`` and ``file`` are relative to the package."""

    def __init__(
        self, package: Package, component: str, target: str, body: Any, model: dict[str, Any]
    ) -> None:
        about, self.ort = _about(body), get(get(body, "executor_info", dict), "ort", dict)
        self.package, self.component, self.target, self.about = package, component, target, about
        self.ep = get(body, "ep", str)
        self.folder = package.inside(get(body, "variant_directory", str))
        self.file = join(self.folder, package.inside(get(self.ort, "model_file", str)))
        prepared = get(about, PREPARED, str, "")
        self.prepared = prepared and join(self.folder, package.inside(prepared))
        self.settings: dict[str, Any] = get(about, "settings", dict, {})
        device = get(body, "device", str, "cpu" if self.ep == CPU_EP else "any")
        self.device = get(self.settings, "device", str, device)
        self.compatibility = get(body, "compatibility_string", str, "")
        # Of the files that its provider options name.
        self.option_files: Path = package.root / self.folder / OPTION_FILES
        self.inputs, self.outputs = (
            {get(entry, "name", str): _shape(entry) for entry in get(about, kind, list, [])}
            for kind in ("inputs", "outputs")
        )
        shapes = [[None] if shape is None else shape for shape in self.inputs.values()]
        sizes = [[n if isinstance(n, int) else math.inf for n in shape] for shape in shapes]
        self.elements = sum(map(math.prod, sizes))
        self.plugin = texts(about, "plugin")
        self.group = get(about, "group", str, "")
        # The axis of the batch in each input and output, if the build has proven that it can be split.
        self.batch: dict[str, dict[str, int]] = get(model, "batch", dict, {})
        # In an editable install: the EPs of the configured targets, of which it has only the source.
        self.configured = texts(model, "targets")
        # Of the companion that has it, if this package has not; and why that cannot be used.
        self.module = texts(model, "modules").get(target, "")
        self.problem: Exception | None = None
        # Identifies the source model and its sizes.
        self.identity = get(model, "identity", str, "")

    def fits(self, request: Request) -> bool:
        """Whether the shapes are large enough in every dimension; open dimensions are."""
        return all(
            not isinstance(size, int) or size >= needed
            for name, shape in request.shapes.items()
            for size, needed in zip(self.inputs.get(name) or (), shape, strict=False)
        )


def get(table: Any, key: str, type_: type[T], default: T | None = None) -> T:
    """The value of ``key``, of this type; the default where it is missing. Raises ValueError otherwise."""
    value = table.get(key) if isinstance(table, dict) else None
    value = default if value is None else value
    if type(value) is not type_:
        raise ValueError(f"{key} must be of the type {type_.__name__}, not {value!r}")
    return value


def _shape(tensor: dict[str, Any]) -> list[Any] | None:
    """The shape of an input; None for an unknown rank."""
    return None if tensor.get("shape", ()) is None else get(tensor, "shape", list)


def texts(table: Any, key: str) -> dict[str, str]:
    texts: dict[str, str] = get(table, key, dict, {})
    return {name: get(texts, name, str) for name in texts}


def _about(body: Any) -> dict[str, Any]:
    """Our part of the metadata of a package, a component or a variant."""
    return get(get(body, "additional_metadata", dict, {}), METADATA, dict, {})


def is_plain(name: str) -> bool:
    """Whether ``name`` is a path below its folder on any system, in its only spelling."""
    # On Windows ".. " is the parent folder too.
    return not {"\\", ":"} & {*name} and all(part.strip(". ") for part in name.split("/"))


def join(folder: str, name: str) -> str:
    # Only an editable install has absolute names, and on Windows they begin with a drive.
    return name if ntpath.isabs(name) else posixpath.normpath(posixpath.join(folder, name))


def damage(root: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool) -> str:
    """What is wrong with the first damaged one of these recorded files, or an empty text."""
    for name, recorded in files.items():
        try:
            # An EP may crash on a truncated file.
            if (size := (root / name).stat().st_size) != recorded["size"]:
                return f"{name} has {size} bytes, and {recorded['size']} were recorded"
            if not (root / name).is_file():
                return f"{name} is no regular file"
            if verify and sha256(root / name) != recorded["sha256"]:
                return f"{name} {_CHANGED}"
        except (OSError, ValueError) as error:
            return f"{name} is missing or cannot be read ({error})"
    return ""


def sha256(file: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _package(folder: Folder | None, verify: bool = False, module: str = "") -> Package:
    """The package in ``folder`` (of the companion ``module``), or the one that contains this module.

    It is read again when it changed.
    """
    from pathlib import Path

    root = Path(__file__).parent if folder is None else Path(folder)
    if (module or folder is None) and not root.is_dir():
        try:
            # The module is inside an archive.
            archived = Package(_files(module or __name__))
            root = beside("_user_cache").unpack(sys.modules[__name__], archived, verify=verify)
        except Exception as error:
            raise LoadError(f"{root} cannot be read ({error})") from error
    with contextlib.suppress(OSError, ValueError):
        stat = (root / MANIFEST).stat()
        return _read(root, stat.st_mtime_ns, stat.st_size)
    return Package(root)


_files = functools.cache(lambda name: importlib.import_module("importlib.resources").files(name))
_read = functools.lru_cache(maxsize=16)(lambda root, *_: Package(root))


def _find_variant(variant: Variant, request: Request) -> Variant:
    """``variant``, or that in its companion; a copy with a ``problem`` if there is none."""
    package, module = variant.package, variant.module
    if not module:
        return variant
    install = f"pip install {package.companions.get(module, module)!r}"
    try:
        if request.verify:
            # It says what the companion must be.
            package.verify()
        # Nothing is imported for a name without dots.
        spec = find_spec(module) if module.isidentifier() else None
        # A folder of this name without a module is no package that was installed.
        if spec is None or not (spec.origin and spec.submodule_search_locations):
            raise SkipTargetError(f"its models are not installed: {install}")  # noqa: TRY301
        companion = _package(spec.submodule_search_locations[0], request.verify, module)
        key = variant.component, variant.target, variant.identity
        for other in itertools.chain.from_iterable(companion.models.values()):
            if key == (other.component, other.target, other.identity):
                return other
        raise LoadError(f"{module} is for another version of this model: {install}")  # noqa: TRY301
    except Exception as error:
        # Of any kind: importers of others may be broken. In a copy, because the package is kept.
        import copy

        missing = copy.copy(variant)
        missing.problem = error.with_traceback(None)
        return missing


def _targets_to_try(package: Package, name: str, request: Request) -> list[str]:
    """The names of the targets to try, in order. Raises LoadError for what the package does not have."""
    if name not in package.models:
        raise LoadError(f"unknown model {name!r}. Known: {', '.join(package.models) or 'none'}.")
    variants, target = package.models[name], request.target
    # All components of a model list their targets in the same order.
    known = list(dict.fromkeys(variant.target for variant in variants))
    if target not in known and target in (configured := variants[0].configured if variants else {}):
        if configured[target] != CPU_EP:
            hint = 'install it with editable = "compile"'
            raise LoadError(f"this editable install has no compiled target {target!r}: {hint}")
        target = SOURCE
    if target is not None and target not in known:
        raise LoadError(f"unknown target {target!r}. Known: {', '.join(known) or 'none'}.")
    # An editable install may have only source models.
    can_recompile = known == [SOURCE] or any(v.prepared or v.module for v in variants)
    if request.recompile and not can_recompile:
        raise LoadError(f"recompile needs a target of {name!r} with recompile = true")
    targets = [target] if target else [t for t in known if request.fallback or t != SOURCE]
    if not targets:
        raise LoadError(f"the model {name!r} has no targets in {package.root}")
    return targets


def _list_candidates(
    package: Package, name: str, request: Request
) -> list[tuple[list[Variant], Callable[..., Any]]]:
    """For each target to try, in order: its variants, the best size first, and the method that opens them.

    Raises LoadError for a model, a target or an input that the package does not have.
    """
    targets = _targets_to_try(package, name, request)
    variants = [_find_variant(v, request) for v in package.models[name] if v.target in targets]
    # Of a companion that is not installed they are unknown.
    inputs = next((variant.inputs for variant in variants if variant.inputs), {})
    for input_name, shape in request.shapes.items():
        sizes = inputs.get(input_name, [])
        if inputs and sizes is not None and len(sizes) != len(shape):
            text = f"{name!r} has the inputs {inputs}, and shapes gives {input_name!r} {shape}"
            raise LoadError(text)
    if request.shapes:
        variants.sort(key=lambda variant: (not variant.fits(request), variant.elements))
    of_targets = [[v for v in variants if v.target == target] for target in targets]
    candidates: list[tuple[list[Variant], Callable[..., Any]]] = []
    for _, group in itertools.groupby(of_targets, lambda v: (v[0].ep, v[0].device)):
        same = list(group)
        candidates += [(v, Opener.open_shipped) for v in same]
        # Behind the contexts for other chips: one of them may be for this one.
        prepared = [v for v in same if request.recompile and v[0].prepared]
        candidates += [(v, Opener.open_compiled) for v in prepared]
    return candidates


def log(level: str, message: str) -> None:
    import logging

    getattr(logging.getLogger(__name__), level)(message, stacklevel=2)


def open_variant(
    method: Any, variants: list[Variant], request: Request
) -> tuple[TargetAttempt, Any]:
    """Open the first of ``variants`` by a ``method`` of `Opener`: the attempt, and the session or None."""
    variant = variants[0]
    try:
        if variant.problem is not None:
            raise variant.problem  # noqa: TRY301
        if not variant.fits(request):
            shapes = ", ".join(str(other.inputs) for other in variants)
            raise SkipTargetError(f"none of its shapes is large enough: {shapes}")  # noqa: TRY301
        session, runs_on = _open(method, Opener(variant, request))
    except (ImportError, SkipTargetError) as error:
        return TargetAttempt(variant.target, Outcome.SKIPPED, str(error)), None
    except Exception as error:
        # Of any kind: a device that has vanished makes onnxruntime raise even MemoryError.
        return TargetAttempt(variant.target, Outcome.FAILED, _cause(error)), None
    session.epcontext_target = variant.target
    return TargetAttempt(variant.target, Outcome.OPENED, runs_on), session


def _open(method: Callable[[Opener], tuple[Any, str]], opener: Opener) -> tuple[Any, str]:
    """The session that ``method`` opens, on a GPU at the second attempt if need be, and what it runs on."""
    try:
        return method(opener)
    except (ImportError, LoadError, SkipTargetError):
        raise
    except Exception as error:
        on_gpu = opener.fallbacks or opener.variant.device == "gpu"
        if method is not Opener.open_shipped or not on_gpu:
            raise
        cause = _cause(error)
    try:
        # While other threads use a GPU, it may fail to open what it opens a moment later.
        session, runs_on = method(opener)
    except Exception:
        if not opener.fallbacks:
            raise
        # As an InferenceSession does, where there is no GPU.
        opener.fallbacks = {}
        session, runs_on = method(opener)
        return session, f"{runs_on}, without its fallback providers ({cause})"
    return session, f"{runs_on}, at the second attempt ({cause})"


def _cause(error: Exception) -> str:
    """``error`` in a short line; the log has it whole for debugging."""
    import re

    log("debug", f"{type(error).__name__}: {error}")
    # Before it onnxruntime names lines and functions of its sources, and behind a failed call of CUDA more.
    function = r"([\w:~]+::[\w~]+|[^()]*\([^()]*\)( const)?( \[with [^]]*\])?) "
    text = re.sub(rf"\S+\.(cc|cpp|cuh?|h|hpp):\d+ {function}", "", str(error).partition(" ; ")[0])
    short = f"{type(error).__name__}: {' '.join(text.split())[:300]}"
    return str(error) if isinstance(error, LoadError) else short


@functools.cache
def _preload_cuda() -> None:
    """Load the libraries of CUDA that pip has installed, if this onnxruntime uses them."""
    ort = vars(importlib.import_module("onnxruntime"))
    # It prints what is missing, and standard output is the app's.
    ort["print"] = lambda *words: log("info", " ".join(map(str, words)))
    with contextlib.suppress(Exception):
        ort["preload_dlls"]()
    ort.pop("print", None)


class Opener:
    """Opens one variant. Its methods raise SkipTargetError where this machine cannot run it."""

    def __init__(self, variant: Variant, request: Request) -> None:
        self.variant, self.request = variant, request
        self.ort: Any = importlib.import_module("onnxruntime")
        # For registering plugin EPs and opening on them: some crash in two threads. One in the process.
        self.lock = vars(self.ort).setdefault(_LOCK, threading.Lock())
        # The kind of device to open on.
        self.kind = request.device or variant.device
        # They also run a target of the CPU, which would hide them, unless the CPU is asked for.
        is_hiding = variant.ep == CPU_EP and not request.target and request.device != "cpu"
        is_fallback = variant.target == SOURCE or is_hiding
        entries = request.fallback_providers or () if is_fallback else ()
        self.fallbacks = {e if isinstance(e, str) else e[0]: e for e in entries}

    def check(self) -> None:
        """Check the requested device, and load the libraries that the EP needs."""
        if "any" not in (self.kind, self.variant.device) and self.kind != self.variant.device:
            other = f"device={self.kind!r} was requested"
            raise SkipTargetError(f"it is for the {self.variant.device}, and {other}")
        if not _CUDA_EPS.isdisjoint((self.variant.ep, *self.fallbacks)):
            _preload_cuda()

    def open_shipped(self) -> tuple[Any, str]:
        return self.open(self.variant.package.on_disk(self.variant, verify=self.request.verify))

    def open_compiled(self) -> Any:
        return beside("_recompile").open_compiled(sys.modules[__name__], self)

    def readable(self, file: Path, encoding: str, reason: str) -> Path:
        """``file`` by a path that can be written in ``encoding`` on Windows: its own, or its short one."""
        if sys.platform != "win32":
            return file
        import ctypes

        short = ctypes.create_unicode_buffer(1 << 15)
        ctypes.windll.kernel32.GetShortPathNameW(str(file), short, len(short))
        for path in filter(None, (str(file), short.value)):
            with contextlib.suppress(UnicodeEncodeError):
                path.encode(encoding)
                return type(file)(path)
        raise SkipTargetError(f"{reason}, or use another folder than {file}")

    def open(self, file: Path) -> tuple[Any, str]:
        """Open the model ``file``; return the session, and what it runs on."""
        variant, ort, options = self.variant, self.ort, self.request.session_options
        if variant.about.get("needs_code_page"):
            crash = f"{variant.ep} crashes where the path has letters outside the code page"
            file = self.readable(
                file, "mbcs", f"{crash} of Windows; set embed = true for the target"
            )
        self.check()
        options = (options() if callable(options) else options) or ort.SessionOptions()
        provider_options = self._provider_options()
        # onnxruntime also counts a registered library among its own.
        is_library = variant.plugin or any("library_path" in e.ep_metadata for e in self._devices())
        is_built_in = not is_library and variant.ep in ort.get_available_providers()
        providers: Any = [(variant.ep, provider_options)] if is_built_in else None
        runs_on = f"{variant.ep} on {variant.device}"
        if self.fallbacks:
            known = ort.get_available_providers()
            providers = [entry for name, entry in self.fallbacks.items() if name in known]
            providers += [] if CPU_EP in self.fallbacks else [CPU_EP]
        had_others = is_built_in and getattr(options, "has_providers", bool)()
        ignoring = warnings.catch_warnings() if had_others else contextlib.nullcontext()
        with self.lock if variant.group or not is_built_in else contextlib.nullcontext(), ignoring:
            if not is_built_in:
                runs_on = self._add_devices(options, provider_options)
            elif had_others:
                # The app's own options still have the EP of a target that failed: these replace it.
                warnings.filterwarnings("ignore", "Specified 'providers'")
            # Now that the EP is found: a target that is skipped leaves the app's options as they are.
            for key, value in texts(variant.ort, "session_options").items():
                options.add_session_config_entry(key, value)
            session = ort.InferenceSession(file, options, providers=providers, enable_fallback=0)
            if variant.group:
                # Earlier sessions have to outlive it: in a tuple, which no garbage collector clears.
                name = (str(variant.package.root), variant.group, variant.target)
                group = _groups.setdefault(name, weakref.WeakSet())
                earlier = (x for other in group for x in (*other.epcontext_earlier, other._sess))  # noqa: SLF001
                session.epcontext_earlier = tuple(dict.fromkeys(earlier))
                group.add(session)
        # If a library of the EP is missing, onnxruntime only logs it, and opens without the EP.
        providers = session.get_providers()
        if variant.ep not in providers and providers[:1] == [CPU_EP]:
            raise SkipTargetError(f"onnxruntime opened it without {variant.ep}: its log has why")
        return session, providers[0] if self.fallbacks else runs_on

    def _provider_options(self) -> dict[str, str]:
        """The variant's provider options, and those of the app unless it is the source."""
        result = texts(self.variant.ort, "provider_options")
        for name, value in texts(self.variant.about, "load_options").items():
            result[name] = value.replace(OPTION_FILE, str(self.variant.option_files))
            if USER_CACHE in value:
                first, _, below = value.partition("/")
                if first != USER_CACHE or not is_plain(value):
                    raise ValueError(f"{name} must be a folder in {USER_CACHE}, not {value!r}")
                folder = user_folder() / below
                folder.mkdir(parents=True, exist_ok=True)
                result[name] = str(folder)
        if self.variant.target != SOURCE:
            for name, more in self.request.provider_options.items():
                result[name] = str(int(more) if isinstance(more, bool) else more)
        return result

    def _add_devices(self, options: Any, provider_options: dict[str, str]) -> str:
        """Add the EP to ``options``; return what a session will run on."""
        # Listed again each time: onnxruntime forgets the devices of a library that is unregistered.
        device, ep, answer = self.find_devices()[0], self.variant.ep, None
        compatibility = self.variant.compatibility
        # Python sessions do not compare it. The manifest says which EPs can: QNN crashes after a session was
        # closed.
        if compatibility and self.variant.about.get("compares"):
            # Also an onnxruntime that is too old, or an EP that gives no answer, may be able to run it.
            with contextlib.suppress(Exception):
                module = importlib.import_module("onnxruntime.capi._pybind_state")
                answer = module.get_model_compatibility_for_ep_devices([device], compatibility).name
        if answer == "EP_UNSUPPORTED":
            gpus = ", ".join(map(str, get(self.variant.settings, "compute_capabilities", list, [])))
            raise SkipTargetError(f"{ep} here cannot run what is for {gpus or compatibility[:40]}")
        # The devices are interchangeable, and a session takes one.
        options.add_provider_for_devices([device], provider_options)
        return f"{ep} on {device.device.type.name.lower()}"

    def find_devices(self) -> list[Any]:
        """The devices that the target can run on, best first; with `lock` held."""
        variant, offered = self.variant, self._offered()
        needed = variant.device if self.kind == "any" else self.kind
        fitting = [device for device in offered if device.device.type.name.lower() == needed]
        is_simulated = offered and not variant.about.get("needs_device")
        if self.kind == "any" and not fitting and is_simulated:
            return offered
        if not fitting:
            kinds = ", ".join(sorted({device.device.type.name.lower() for device in offered}))
            only = f", only {kinds}" if kinds else " on this machine"
            accepts = " (device='any' accepts it)" if is_simulated else ""
            if offered and not is_simulated:
                accepts = " (no simulator opens it: it shares weights, or is for several chips)"
            what = "device" if needed == "any" else needed
            # The manifest says which EPs can be asked.
            reasons, asked = [], importlib.import_module("onnxruntime.capi._pybind_state")
            with contextlib.suppress(Exception):
                for hardware in asked.get_hardware_devices() if variant.about["compares"] else ():
                    if needed in ("any", hardware.type.name.lower()):
                        details = asked.get_hardware_device_ep_incompatibility_details
                        reasons += details(variant.ep, hardware)["notes"].split()
            why = f": {' '.join(reasons)}" if reasons else ""
            raise SkipTargetError(f"{variant.ep} finds no {what}{only}{accepts}{why}")
        return fitting

    def _offered(self) -> list[Any]:
        """The devices of the variant's EP. Its library is registered if needed, once per process."""
        ort, ep, plugin, library = self.ort, self.variant.ep, self.variant.plugin, ""
        if not hasattr(ort, "get_ep_devices"):
            raise SkipTargetError(f"onnxruntime {ort.__version__} is too old for {ep}")
        if offered := self._devices():
            return offered
        if not plugin.get("module"):
            version = f"onnxruntime {ort.__version__} does not contain {ep}"
            raise SkipTargetError(f"{version}, and the app has registered no library of it")
        try:
            library = str(importlib.import_module(plugin["module"]).get_library_path())
            # The app may have registered the library under another name, as which some EPs appear.
            if not self._devices(library):
                ort.register_execution_provider_library(plugin["registration_name"], library)
        except ImportError as error:
            raise SkipTargetError(f"{plugin['package']} is not installed ({error})") from error
        except Exception as error:
            # The app, or another package's loader, may have registered it at the same moment.
            if not self._devices(library) and "already registered" not in str(error):
                reason = f"the library of {plugin['package']} cannot be loaded"
                raise SkipTargetError(f"{reason} ({type(error).__name__}: {error})") from error
        return self._devices(library)

    def _devices(self, library: str = "") -> list[Any]:
        """The EP's devices, or else those that the file ``library`` offers under another name."""
        devices: list[Any] = getattr(self.ort, "get_ep_devices", list)()
        own = [device for device in devices if device.ep_name == self.variant.ep]
        for device in devices if library and not own else ():
            path = os.path.realpath(device.ep_metadata.get("library_path", ""))
            if path == os.path.realpath(library):
                own.append(device)
        return own


@functools.cache
def user_folder() -> Path:
    """The app's own folder in the user's cache, or one for this process where that cannot be written."""
    folder: Path = beside("_user_cache").make_folder(sys.modules[__name__])
    return folder


def beside(name: str) -> Any:
    """The module ``name`` beside this one, which only some calls need."""
    return importlib.import_module(f".{name}", __package__)


def _register_ready() -> None:
    """Register, once in a process, the EPs that Windows ML's catalogue has on this machine."""
    try:
        ort, catalogue = map(importlib.import_module, ("onnxruntime", "windowsml"))
        with vars(ort).setdefault(_LOCK, threading.Lock()):
            # Kept: with some drivers it crashes when it is closed.
            if "_epcontext_catalog" not in vars(ort):
                vars(ort)["_epcontext_catalog"] = eps = catalogue.EpCatalog()
                offered = {device.ep_name for device in ort.get_ep_devices()}
                for provider in eps.find_all_providers():
                    # What fails is skipped with its reason: its EP is not registered.
                    with contextlib.suppress(Exception):
                        if provider.ready_state.name == "Ready" and provider.name not in offered:
                            ort.register_execution_provider_library(
                                provider.name, provider.library_path
                            )
    except Exception as error:
        log("info", f"the catalogue of Windows ML cannot be used ({error})")


def _forget_lock() -> None:
    if ort := sys.modules.get("onnxruntime"):
        vars(ort).pop(_LOCK, None)


# In a child the thread that holds the lock does not exist. Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)

"""ONNX Runtime sessions: choose an EP's devices, open models."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.config.settings import CompileSettings, OptionFile, Target
from hatch_epcontext.errors import Kind, ModelError, Problem, UnavailableError
from hatch_epcontext.files import file_sha256
from hatch_epcontext.providers import DISTRIBUTIONS, Provider
from hatch_epcontext.shipped import USER_CACHE
from hatch_epcontext.text import show
from hatch_epcontext.worker.libraries import preload, register, unloadable

LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

MIN_EXTERNAL = 1024
"""The bytes from which ONNX Runtime's sessions write a tensor into the file for external data."""


def options(
    target: Target,
    provider_options: Mapping[str, str],
    session_options: Mapping[str, str] | None = None,
) -> ort.SessionOptions:
    """Return session options with the target's EP added, and with ``provider_options``.

    ``session_options`` are added to the target's. Raises UnavailableError when the EP has no library,
    no driver or no device on this machine, and ModelError when a file of an option was changed.
    """
    provider, settings = target.provider, target.settings
    provider_options = {
        name: _with_own_cache(_put_files(name, value, target.files))
        for name, value in provider_options.items()
    }
    result = _session_options()
    for key, value in {**settings.session_options, **(session_options or {})}.items():
        result.add_session_config_entry(key, value)
    if provider.plugin is None:
        add_built_in(result, provider, provider_options)
        return result
    register(provider.plugin, provider.ep)
    devices = _devices(provider, settings)
    result.add_provider_for_devices(devices, dict(provider_options))
    return result


def runs_on_simulator(target: Target) -> bool:
    """Whether what is opened on ``target`` runs on a simulator: the EP offers no device of its kind."""
    if not target.provider.simulator or target.settings.device == "any":
        return bool(target.provider.simulator)
    (device,) = _devices(target.provider, target.settings)
    return bool(device.device.type.name.lower() != target.settings.device)


@contextlib.contextmanager
def on_core(number: int) -> Iterator[None]:
    """Keep this thread, and those that start meanwhile, on a core, where the system can."""
    if sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    # Some containers forbid it.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _put_files(option: str, value: str, files: Iterable[OptionFile]) -> str:
    """``value`` with paths of this machine; raises ModelError when a file is not the one that was read."""
    for file in files:
        if not file.is_in({option: value}):
            continue
        path = Path(file.path)
        if not (path.is_file() and file_sha256(path) == file.sha256):
            message = f"{file.path}, which the option {option} names, is missing, or was changed."
            hint = "Every machine that compiles needs the same file at this path."
            raise ModelError(Problem(Kind.FILE_NOT_FOUND, "", message, hint))
        value = value.replace(file.placeholder, near(path))
    return value


def _session_options() -> ort.SessionOptions:
    result = ort.SessionOptions()
    # Spinning threads would take cores from other jobs, and from the EP's own threads.
    result.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # By default the CPU computes int4 weights with activations of int8: 46 dB, and less in deep models.
    result.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return result


def cpu_options() -> ort.SessionOptions:
    """Return session options for the CPU EP only."""
    result = _session_options()
    result.add_provider("CPUExecutionProvider", {})
    return result


def context_options(target: Target, *, sharing: bool = False) -> ort.SessionOptions:
    """Return session options to open an artifact with, as the loader does."""
    shared = {"ep.share_ep_contexts": "1"} if sharing else {}
    result = options(target, target.load_options, shared)
    if target.provider.product == "context":
        # Nothing may be compiled now: the artifact must contain everything.
        result.add_session_config_entry("session.disable_model_compile", "1")
    return result


def _with_own_cache(value: str) -> str:
    # The loader uses the user's cache folder, and a worker its own working directory.
    if USER_CACHE not in value:
        return value
    path = value.replace(USER_CACHE, near(Path.cwd() / "user-cache"))
    Path(path).mkdir(parents=True, exist_ok=True)
    return path


def open_session(model: Path | bytes, session_options: ort.SessionOptions) -> ort.InferenceSession:
    """Open a session without fallback: by default the CPU EP replaces an EP that fails."""
    source = model if isinstance(model, bytes) else near(model)
    return ort.InferenceSession(source, session_options, enable_fallback=0)


def open_unoptimized(model: bytes, path: Path | None = None) -> ort.InferenceSession:
    """Open a session that computes each node on the CPU: optimizations remove casts and fuse nodes.

    ``path``: the file of the ``model``, beside which its external data is.
    """
    session_options = cpu_options()
    session_options.graph_optimization_level = LEVELS["none"]
    # More threads do not help many small nodes, and other jobs need them.
    session_options.intra_op_num_threads = 1
    if path is not None:
        set_model_path(path, session_options)
    return open_session(model, session_options)


def set_model_path(path: Path, session_options: ort.SessionOptions) -> None:
    """Set in ``session_options`` the file of a model that a session will open from bytes.

    The bytes have no path, but ONNX Runtime must find the sidecars and the external data beside the file.
    The second option by itself would apply to sidecars too, and a file name would count as a folder.
    """
    session_options.add_session_config_entry("ep.context_file_path", near(path))
    session_options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", near(path.parent)
    )


def near(path: Path) -> str:
    """``path`` for ONNX Runtime and EPs: on Windows relative to the worker's working directory.

    There `ModelCompiler` and EPs read paths in the system's code page, which may lack letters of the folders
    above, such as the user's, or replace them.
    """
    if sys.platform == "win32":
        # A path on another drive has no relative path.
        with contextlib.suppress(ValueError):
            return os.path.relpath(path)
    return str(path)


def add_built_in(
    result: ort.SessionOptions, provider: Provider, provider_options: Mapping[str, str]
) -> None:
    """Add an EP that is a part of ONNX Runtime.

    Raises UnavailableError when this ONNX Runtime lacks it, or its library does not load.
    """
    available = ort.get_available_providers()
    if provider.ep not in available:
        message = (
            f"this ONNX Runtime ({ort.__version__}) has no {provider.ep}.\n"
            f"It has {', '.join(available)}."
        )
        hint = f"Install {' or '.join(provider.distributions)} instead of it."
        if provider.distributions[0] == DISTRIBUTIONS[0]:
            # That of another system has it.
            hint = f"{provider.ep} needs {provider.needs}."
        raise UnavailableError(Problem(Kind.MISSING_REQUIREMENT, "", message, hint))
    if provider.ep == "CPUExecutionProvider":
        result.add_provider(provider.ep, dict(provider_options))
        return
    preload()
    try:
        result.add_provider(provider.ep, dict(provider_options))
    except Exception as error:
        # ONNX Runtime reports the reason only in its log.
        stem = provider.ep.removesuffix("ExecutionProvider").lower()
        name = f"onnxruntime_providers_{stem}"
        name = f"{name}.dll" if sys.platform == "win32" else f"lib{name}.so"
        library = Path(ort.__file__).parent / "capi" / name
        raise UnavailableError(unloadable(provider.ep, str(error), library)) from error


def _devices(provider: Provider, settings: CompileSettings) -> list[Any]:
    """Return the EP's devices that fit the settings; any of its devices if it cross-compiles for that kind.

    Only devices of exactly this EP: those of two EPs cannot be mixed, and several EPs can share a name.
    """
    offered = [device for device in ort.get_ep_devices() if device.ep_name == provider.ep]
    kinds = offered
    if settings.device != "any":
        kinds = [device for device in offered if device.device.type.name.lower() == settings.device]
        if settings.device in provider.cross_compiles:
            kinds = kinds or offered
    if kinds:
        # Devices that fit are interchangeable.
        return kinds[:1]
    message = "\n".join(
        [
            f"{provider.ep} finds no device" + (f" that is {settings.device}." if offered else "."),
            *([f"It needs {provider.needs}."] if provider.needs and not offered else []),
            "ONNX Runtime has:",
            *(f"  {describe_device(device)}" for device in ort.get_ep_devices()),
            *(f"  {line}" for line in incompatibilities(provider.ep)),
        ]
    )
    hint = (
        f"Without one it compiles for device = {' or '.join(map(show, provider.cross_compiles))}."
        if offered and provider.cross_compiles
        else "Choose one with device."
        if offered
        else "Build on a machine that has one, or leave the target out."
    )
    raise UnavailableError(Problem(Kind.NO_DEVICE, "", message, hint))


def describe_device(device: Any) -> str:
    """Describe a device of an EP: the EP, the kind of device, its vendor, and what distinguishes it."""
    facts = {**dict(device.device.metadata), **dict(device.ep_metadata)}
    # Left out: what is the same for all devices (the library's path and version), and names in capitals (the
    # hardware's features).
    same = ("library_path", "version")
    shown = [f"{n} = {v!r}" for n, v in facts.items() if n.islower() and n not in same]
    kind = device.device.type.name.lower()
    return ", ".join([f"{device.ep_name} on {kind} ({device.device.vendor or 'unknown'})", *shown])


def incompatible(target: Target, compatibility: str) -> str | None:
    """Why the EP's device cannot run a context with this compatibility string, if the EP reports that."""
    provider = target.provider
    if not is_incompatible(_devices(provider, target.settings), compatibility):
        return None
    return f"{provider.ep} reports that its device or its version cannot run what was compiled"


def is_incompatible(devices: list[Any], compatibility: str) -> bool:
    """Whether the EP of ``devices`` says that they cannot run a context with this compatibility string."""
    try:
        from onnxruntime.capi._pybind_state import get_model_compatibility_for_ep_devices as compare

        return bool(compare(devices, compatibility).name == "EP_UNSUPPORTED")
    except Exception:
        # Opening it shows whether they can.
        return False


def incompatibilities(ep: str) -> Iterator[str]:
    """Yield the EP's own reasons for each piece of hardware that it does not support."""
    try:
        from onnxruntime.capi._pybind_state import (
            get_hardware_device_ep_incompatibility_details,
            get_hardware_devices,
        )
    except ImportError:
        return
    for hardware in get_hardware_devices():
        try:
            details = get_hardware_device_ep_incompatibility_details(ep, hardware)
        except Exception as error:
            yield f"{ep} gives no reason: {error}"
            return
        if details["reasons_bitmask"] or details["notes"]:
            kind = hardware.type.name.lower()
            reason = details["notes"] or f"reasons {details['reasons_bitmask']:#x}"
            yield f"{ep} on {kind} ({hardware.vendor or 'unknown'}): {reason}"

"""ONNX Runtime sessions: registering an EP, picking its devices, opening models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from hatch_epcontext.errors import Problem
from hatch_epcontext.loader import USER_CACHE
from hatch_epcontext.protocol import TargetSpec
from hatch_epcontext.providers import PROVIDERS, Product, Provider
from hatch_epcontext.worker.libraries import AbsentError, register, unloadable

LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def provider_of(target: TargetSpec) -> Provider:
    """What is known of the target's provider."""
    known = PROVIDERS[target.provider]
    return dataclasses.replace(known, ep=target.ep, plugin=target.plugin)


def options(
    target: TargetSpec,
    provider_options: Mapping[str, str],
    session_options: Mapping[str, str] | None = None,
) -> ort.SessionOptions:
    """Session options with the target's EP added; both kinds of options are those of the moment.

    Raises AbsentError when the EP has no library, no driver or no device here.
    """
    provider = provider_of(target)
    result = ort.SessionOptions()
    for key, value in {**target.session_options, **(session_options or {})}.items():
        result.add_session_config_entry(key, value)
    if provider.plugin is None:
        add_built_in(result, provider, provider_options)
        return result
    register(provider.plugin, provider.ep, virtual=target.virtual_devices)
    devices = _devices(provider, target)
    if target.policy is None:
        result.add_provider_for_devices(devices, dict(provider_options))
        return result
    # A policy takes no options; this is where ONNX Runtime itself keeps those of an EP.
    for key, value in provider_options.items():
        result.add_session_config_entry(f"ep.{provider.ep.lower()}.{key}", value)
    policy = target.policy.replace("-", "_").upper()
    result.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.__members__[policy])
    return result


def cpu_options() -> ort.SessionOptions:
    """Session options for the CPU EP alone."""
    result = ort.SessionOptions()
    result.add_provider("CPUExecutionProvider", {})
    return result


def context_options(
    target: TargetSpec, product: Product, *, sharing: bool = False
) -> ort.SessionOptions:
    """Session options to open an artifact with, as the loader does."""
    shared = {"ep.share_ep_contexts": "1"} if sharing else {}
    load_options = {name: _in_own_folder(value) for name, value in target.load_options.items()}
    result = options(target, load_options, shared)
    if product == "context":
        # What would have to be compiled now was not compiled then.
        result.add_session_config_entry("session.disable_model_compile", "1")
    return result


def _in_own_folder(value: str) -> str:
    # Where the loader has the user's cache folder, a worker has the folder that it runs in.
    if USER_CACHE not in value:
        return value
    path = value.replace(USER_CACHE, str(Path.cwd() / "user-cache"))
    Path(path).mkdir(parents=True, exist_ok=True)
    return path


def open_session(model: Path | bytes, session_options: ort.SessionOptions) -> ort.InferenceSession:
    """A session that stays with its EP: by default one that fails is replaced by the CPU's."""
    return ort.InferenceSession(model, session_options, enable_fallback=0)


def use_bytes_of(path: Path, session_options: ort.SessionOptions) -> None:
    """Say in ``session_options`` where the bytes come from with which a session will be opened.

    They do not say it themselves, and what lies beside the file has to be found. The second option alone
    would have sidecars looked for there as well, by a name that is taken for a folder.
    """
    session_options.add_session_config_entry("ep.context_file_path", str(path))
    session_options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent)
    )


def add_built_in(
    result: ort.SessionOptions, provider: Provider, provider_options: Mapping[str, str]
) -> None:
    """Add an EP that is a part of ONNX Runtime; raises AbsentError when it is not, or does not load."""
    there = ort.get_available_providers()
    if provider.ep not in there:
        raise AbsentError(
            Problem(
                "",
                f"this ONNX Runtime ({ort.__version__}) has no {provider.ep}.\n"
                f"It has {', '.join(there)}.",
                f"Install {' or '.join(provider.flavours)} in its place.",
            )
        )
    if provider.ep == "CPUExecutionProvider":
        result.add_provider(provider.ep, dict(provider_options))
        return
    # Those that were installed by pip are on no path on which the system's loader looks.
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    try:
        result.add_provider(provider.ep, dict(provider_options))
    except Exception as error:
        # ONNX Runtime only logs why.
        stem = provider.ep.removesuffix("ExecutionProvider").lower()
        library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{stem}.so"
        raise AbsentError(unloadable(provider.ep, str(error), library)) from error


def _devices(provider: Provider, target: TargetSpec) -> list[Any]:
    """The EP's devices that the target wants; of an EP that cross-compiles, or else any other.

    Only those of exactly this EP: those of two EPs may not be mixed, and some EPs have namesakes.
    """
    offered = [each for each in ort.get_ep_devices() if each.ep_name == provider.ep]
    kinds = offered
    if target.device != "any":
        kinds = [each for each in offered if each.device.type.name.lower() == target.device]
        if provider.cross_compiles:
            kinds = kinds or offered
    chosen = [each for each in kinds if matches(each, target.device_filter)]
    if chosen:
        # Devices that fit are interchangeable, unless ONNX Runtime is to choose among them.
        return chosen if target.policy else chosen[:1]
    wanted: list[str] = [target.device] if target.device != "any" else []
    wanted += [f"{name} = {value!r}" for name, value in target.device_filter.items()]
    raise AbsentError(
        Problem(
            "",
            "\n".join(
                [
                    f"{provider.ep} finds no device here"
                    + (f" that is {', '.join(wanted)}." if wanted and offered else "."),
                    *([f"It needs {provider.needs}."] if provider.needs and not offered else []),
                    "ONNX Runtime has:",
                    *(f"  {described(each)}" for each in ort.get_ep_devices()),
                    *(f"  {line}" for line in incompatibilities(provider.ep)),
                ]
            ),
            "Choose one with device and device-filter."
            if offered
            else "Build where there is one, or choose other targets with HATCH_EPCONTEXT_TARGETS.",
        )
    )


def matches(device: Any, wanted: Mapping[str, str]) -> bool:
    """Whether an EP's device is what a ``device-filter`` asks for; letters' case does not count."""
    facts = {
        **dict(device.device.metadata),
        **dict(device.ep_metadata),
        "type": device.device.type.name,
        "vendor": device.device.vendor,
        "vendor-id": str(device.device.vendor_id),
        "device-id": str(device.device.device_id),
    }
    return all(facts.get(name, "").casefold() == value.casefold() for name, value in wanted.items())


def described(device: Any) -> str:
    """A device of an EP in words: the EP, the kind of device, its vendor, and what tells it apart."""
    facts = {**dict(device.device.metadata), **dict(device.ep_metadata)}
    # What tells devices apart: not where the library lies, nor what the hardware can do (in capitals).
    same = ("library_path", "version")
    told = [f"{n} = {v!r}" for n, v in facts.items() if n.islower() and n not in same]
    kind = device.device.type.name.lower()
    return ", ".join([f"{device.ep_name} on {kind} ({device.device.vendor or 'unknown'})", *told])


def incompatibilities(ep: str) -> Iterator[str]:
    """What the EP itself says of each piece of hardware that it does not take."""
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
            yield f"{ep} says nothing of why: {error}"
            return
        if details["reasons_bitmask"] or details["notes"]:
            kind = hardware.type.name.lower()
            reason = details["notes"] or f"reasons {details['reasons_bitmask']:#x}"
            yield f"{ep} on {kind} ({hardware.vendor or 'unknown'}): {reason}"

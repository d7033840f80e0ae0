# SPDX-License-Identifier: MIT
"""Opens precompiled ONNX models, which hatch-epcontext has put into this package.

    from my_app.epcontext import load

    session = load("model")  # an onnxruntime.InferenceSession

``load`` tries the model's targets in order, and opens the first that this machine can run. If there is
none, it opens the source model on the CPU. ``explain`` lists the outcome and the reason for each target.

This module needs Python's standard library and onnxruntime, and nothing else.
"""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["LoadError", "Outcome", "Step", "explain", "load", "models", "target_of"]

Device = Literal["npu", "gpu", "cpu", "any"]

SOURCE = "source"
"""The name of the last target, which is the source model on the CPU."""

USER_CACHE = "{user-cache}"
"""Stands in a provider option for the app's own folder inside the user's cache folder."""

_log = logging.getLogger(__name__)
_folder = Path(__file__).resolve().parent
_registration_lock = threading.Lock()
_target_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# For each session that shares weights, the earlier sessions of its group, which have to outlive it.
_earlier_sessions: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_groups: dict[tuple[str, str], weakref.WeakSet[Any]] = {}


class LoadError(RuntimeError):
    """No session could be opened. The message has the reason for each target."""


class Outcome(str, Enum):
    """The outcome of trying a target. Each member equals its text: ``Outcome.OPENED == "opened"``."""

    OPENED = "opened"
    SKIPPED = "skipped"
    """This machine cannot or should not run the target."""
    FAILED = "failed"
    """onnxruntime raised an error."""
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
        return f"{text}, {self.reason}" if self.reason else text


class _SkipTargetError(Exception):
    """This machine cannot or should not run a target."""


def models() -> list[str]:
    """The names of the models in this package."""
    return list(_manifest()["models"])


def load(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    session_options: onnxruntime.SessionOptions
    | Callable[[], onnxruntime.SessionOptions]
    | None = None,
    provider_options: Mapping[str, object] | None = None,
) -> onnxruntime.InferenceSession:
    """Open the model ``name`` on the first target that this machine can run.

    ``target``: try only this target ("source" for the source model on the CPU).
    ``device``: try only targets on a device of this kind. "any" also accepts a device that only
    simulates the target's device. By default each target needs the device that it was built for.
    ``session_options``: the app's own session options, to which the target's settings and execution
    provider are added. A function that creates them is called once for each target that is tried.
    ``provider_options``: more options of the execution provider, such as the address of a stream. They
    are used for all targets except the source model.

    Raises LoadError when no target could be opened.
    """
    steps: list[Step] = []
    session = None
    for step, opened in _try_targets(name, target, device, session_options, provider_options or {}):
        steps.append(step)
        level = logging.WARNING if step.outcome is Outcome.FAILED else logging.INFO
        _log.log(level, "%s on %s", name, step)
        session = opened or session
    if session is None:
        lines = "\n".join(f"  {step}" for step in steps)
        raise LoadError(f"the model {name!r} cannot be opened on this machine:\n{lines}")
    return session


def explain(name: str, *, target: str | None = None, device: Device | None = None) -> list[Step]:
    """The steps of `load` with the same arguments. It opens a session to find out."""
    return [step for step, _ in _try_targets(name, target, device, None, {})]


def target_of(session: onnxruntime.InferenceSession) -> str:
    """The target on which `load` opened ``session``; "source" for the source model on the CPU."""
    return _target_names[session]


def _manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((_folder / "epcontext.json").read_text("utf-8"))
    return manifest


def _try_targets(
    name: str,
    target: str | None,
    device: Device | None,
    session_options: Any,
    provider_options: Mapping[str, object],
) -> Iterator[tuple[Step, Any]]:
    """Yield a step for each target, with the session of the one that is opened and else None."""
    shipped = _manifest()["models"]
    if name not in shipped:
        raise LoadError(_unknown("model", name, list(shipped)))
    entries = [*shipped[name]["targets"], _source_entry(shipped[name])]
    if target is not None:
        chosen = [entry for entry in entries if entry["target"] == target]
        if not chosen:
            raise LoadError(_unknown("target", target, [entry["target"] for entry in entries]))
        entries = chosen
    done = False
    for entry in entries:
        if done:
            yield Step(entry["target"], Outcome.NOT_TRIED, None), None
            continue
        try:
            session, runs_on = _open(entry, device, session_options, provider_options)
        except _SkipTargetError as error:
            yield Step(entry["target"], Outcome.SKIPPED, str(error)), None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            yield Step(entry["target"], Outcome.FAILED, reason), None
        else:
            done = True
            _target_names[session] = entry["target"]
            _keep_alive(session, entry)
            yield Step(entry["target"], Outcome.OPENED, runs_on), session


def _keep_alive(session: Any, entry: dict[str, Any]) -> None:
    """Keep the earlier sessions of the entry's weight-sharing group alive as long as ``session``."""
    if entry["sharing"] is not None:
        group = _groups.setdefault((entry["sharing"]["group"], entry["target"]), weakref.WeakSet())
        _earlier_sessions[session] = tuple(group)
        group.add(session)


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(known)}."


def _source_entry(model: dict[str, Any]) -> dict[str, Any]:
    """The source model as the entry of a target."""
    return {
        "target": SOURCE,
        "product": SOURCE,
        "plugin": None,
        "model_file": model["source"]["model_file"],
        "compatibility_string": "",
        "settings": {
            "ep": "CPUExecutionProvider",
            "device": "cpu",
            "device_filter": {},
            "policy": None,
            "session_options": {},
        },
        "load_options": {},
        "sharing": None,
    }


def _open(
    entry: dict[str, Any],
    device: Device | None,
    session_options: Any,
    provider_options: Mapping[str, object],
) -> tuple[Any, str]:
    """Open the target of ``entry``; return the session, and a text that says what it runs on."""
    settings = entry["settings"]
    ep = settings["ep"]
    if entry["model_file"] is None:
        raise _SkipTargetError("the package does not contain the source model")
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise _SkipTargetError(f"onnxruntime cannot be imported ({error})") from error
    wanted = device or settings["device"]
    if "any" not in (wanted, settings["device"]) and wanted != settings["device"]:
        raise _SkipTargetError(
            f"it is for the {settings['device']}, and device={wanted!r} was requested"
        )
    options = session_options() if callable(session_options) else session_options
    options = options or ort.SessionOptions()
    for key, value in settings["session_options"].items():
        options.add_session_config_entry(key, value)
    path = _folder / entry["model_file"]
    load_options = _load_options(entry, provider_options)
    if entry["sharing"] is not None:
        options.add_session_config_entry("ep.share_ep_contexts", "1")
    if entry["plugin"] is None:
        return _open_built_in(ort, entry, path, options, load_options)
    devices = _devices(ort, entry, wanted)
    compatibility = _compatibility(devices, entry["compatibility_string"])
    if compatibility == "EP_UNSUPPORTED":
        raise _SkipTargetError(f"{ep} cannot run this compiled model on this machine")
    _forbid_compiling(entry, options)
    if settings["policy"] is None:
        # These devices are interchangeable, and a session takes one.
        options.add_provider_for_devices(devices[:1], load_options)
        runs_on = f"{ep} on {_kind(devices[0])}"
    else:
        # A policy takes no provider options. These keys are where onnxruntime itself keeps them.
        for name, value in load_options.items():
            options.add_session_config_entry(f"ep.{ep.lower()}.{name}", value)
        policy = settings["policy"].replace("-", "_").upper()
        options.set_provider_selection_policy(
            ort.OrtExecutionProviderDevicePolicy.__members__[policy]
        )
        runs_on = f"{ep}, by the policy {settings['policy']}"
    session = ort.InferenceSession(path, options, enable_fallback=0)
    _check_has_ep(session, ep)
    if compatibility == "EP_SUPPORTED_PREFER_RECOMPILATION":
        runs_on += ", which would be faster if the model were compiled again"
    return session, runs_on


def _load_options(entry: dict[str, Any], more: Mapping[str, object]) -> dict[str, str]:
    """The entry's provider options for loading, and ``more`` from the app unless it is the source."""
    result = {name: _expand_user_cache(value) for name, value in entry["load_options"].items()}
    if entry["target"] != SOURCE:
        for name, value in more.items():
            result[name] = str(int(value) if isinstance(value, bool) else value)
    return result


def _open_built_in(
    ort: Any, entry: dict[str, Any], path: Path, options: Any, load_options: dict[str, str]
) -> tuple[Any, str]:
    """`_open` for an EP that is part of onnxruntime's own distribution."""
    ep = entry["settings"]["ep"]
    if ep not in ort.get_available_providers():
        raise _SkipTargetError(f"this onnxruntime ({ort.__version__}) does not contain {ep}")
    _forbid_compiling(entry, options)
    session = ort.InferenceSession(path, options, providers=[(ep, load_options)], enable_fallback=0)
    _check_has_ep(session, ep)
    return session, f"{ep} on {entry['settings']['device']}"


def _forbid_compiling(entry: dict[str, Any], options: Any) -> None:
    if entry["product"] == "context":
        # Where the EP does not accept the context: fail, and do not compile on the user's machine.
        options.add_session_config_entry("session.disable_model_compile", "1")


def _check_has_ep(session: Any, ep: str) -> None:
    # If a library of the EP is missing, onnxruntime only logs it, and opens the session without the EP.
    if ep not in session.get_providers():
        raise _SkipTargetError(
            f"the session was opened without {ep}; onnxruntime's log may name a missing library"
        )


def _expand_user_cache(value: str) -> str:
    """``value`` with ``{user-cache}`` replaced by the app's own cache folder.

    A value that contains ``{user-cache}`` is a folder, which is created.
    """
    if USER_CACHE not in value:
        return value
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = value.replace(USER_CACHE, str(Path(base) / __name__.split(".")[0]))
    Path(path).mkdir(parents=True, exist_ok=True)
    return path


def _kind(device: Any) -> str:
    return str(device.device.type.name).lower()


def _devices(ort: Any, entry: dict[str, Any], wanted: str) -> list[Any]:
    """The devices that the target can run on, best first; ``wanted`` is a kind of device or "any"."""
    settings = entry["settings"]
    offered = [each for each in _offered(ort, entry) if _passes(each, settings["device_filter"])]
    if wanted == "any":
        fitting = [each for each in offered if _kind(each) == settings["device"]]
        if not fitting and entry["sharing"] is not None and entry["sharing"]["needs_device"]:
            raise _SkipTargetError(
                f"models that share weights need a real {settings['device']}, not a simulated one"
            )
        fitting = fitting or offered
    else:
        fitting = [each for each in offered if _kind(each) == wanted]
    if not fitting:
        kinds = ", ".join(sorted({_kind(each) for each in offered}))
        raise _SkipTargetError(
            f"{settings['ep']} finds no {'device' if wanted == 'any' else wanted}"
            + (f", only {kinds} (device='any' accepts it)" if kinds else " on this machine")
        )
    return fitting


def _passes(device: Any, wanted: Mapping[str, str]) -> bool:
    """Whether ``device`` has no known property that differs from ``wanted``; unknown ones pass."""
    facts = {
        **dict(device.device.metadata),
        **dict(device.ep_metadata),
        "vendor": device.device.vendor,
        "vendor-id": str(device.device.vendor_id),
    }
    return all(
        facts.get(name, value).casefold() == value.casefold() for name, value in wanted.items()
    )


def _offered(ort: Any, entry: dict[str, Any]) -> list[Any]:
    """The devices of the entry's EP. Its library is registered if needed, once per process."""
    ep = entry["settings"]["ep"]
    if not hasattr(ort, "get_ep_devices"):
        raise _SkipTargetError(f"onnxruntime {ort.__version__} is too old for {ep}")
    with _registration_lock:
        offered = [each for each in ort.get_ep_devices() if each.ep_name == ep]
        plugin = entry["plugin"]
        if offered:
            return offered
        if not plugin["module"]:
            raise _SkipTargetError(
                f"{ep} is not registered; the app has to call "
                "onnxruntime.register_execution_provider_library first"
            )
        try:
            module = importlib.import_module(plugin["module"])
        except ImportError as error:
            raise _SkipTargetError(f"{plugin['package']} is not installed ({error})") from error
        try:
            ort.register_execution_provider_library(
                plugin["registration_name"], module.get_library_path()
            )
        except Exception as error:
            raise _SkipTargetError(
                f"the library of {plugin['package']} cannot be loaded ({error})"
            ) from error
        return [each for each in ort.get_ep_devices() if each.ep_name == ep]


def _compatibility(devices: list[Any], compatibility: str) -> str | None:
    """The EP's own answer whether it can run what was compiled: a name of onnxruntime's
    ``OrtCompiledModelCompatibility``, or None if it gives no answer.
    """
    try:
        from onnxruntime.capi._pybind_state import get_model_compatibility_for_ep_devices
    except ImportError:
        return None
    if not compatibility:
        return None
    try:
        return str(get_model_compatibility_for_ep_devices(devices, compatibility).name)
    except Exception as error:
        # Some EPs raise when they are asked about a device that only simulates theirs.
        _log.debug("the EP gives no answer on compatibility: %s", error)
        return None

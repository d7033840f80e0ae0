# SPDX-License-Identifier: MIT
"""Opens precompiled ONNX models: made by hatch-epcontext, shipped inside the app's own package.

    from my_app.epcontext import load

    session = load("model")  # an onnxruntime.InferenceSession

``load`` goes through the model's targets in order and opens the first that this machine can run; where
there is none, the source model on the CPU. ``explain`` says which, and why not the others.

This module needs onnxruntime, and nothing but Python's standard library beside it.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["LoadError", "Step", "explain", "load", "models", "target_of"]

Device = Literal["npu", "gpu", "cpu", "any"]

SOURCE = "source"
"""The name under which the source model, run on the CPU, stands beside the targets."""

USER_CACHE = "{user-cache}"
"""In a provider option that is a folder: the app's own folder in the user's cache folder."""

_log = logging.getLogger(__name__)
_folder = Path(__file__).resolve().parent
_registering = threading.Lock()
_targets: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Sessions that share weights: each with those that were opened before it, which have to outlive it.
_before: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_sharing: dict[tuple[str, str], weakref.WeakSet[Any]] = {}


class LoadError(RuntimeError):
    """No session could be opened; the message says why, target by target."""


class Step(NamedTuple):
    """What became of one target: ``outcome`` is "opened", "skipped", "failed" or "not tried"."""

    target: str
    outcome: str
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.outcome}" + (f", {self.reason}" if self.reason else "")


class _Skip(Exception):
    """This machine cannot or should not run a target."""


def models() -> list[str]:
    """The names of the models that are shipped here."""
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

    ``target``: only this one ("source" for the source model on the CPU).
    ``device``: only targets on a device of this kind; "any" also takes what merely simulates the
    target's device. Without it each target wants the device that it was built for.
    ``session_options``: the app's own. An object is given the target's settings and execution
    provider; with a function that makes one, each target that is tried gets a fresh one.
    ``provider_options``: more options of the execution provider, such as the address of a stream; they
    are for the targets, and not for the source model.

    Raises LoadError when nothing could be opened.
    """
    steps: list[Step] = []
    session = None
    for step, opened in _walk(name, target, device, session_options, provider_options or {}):
        steps.append(step)
        _log.log(
            logging.WARNING if step.outcome == "failed" else logging.INFO, "%s on %s", name, step
        )
        session = opened or session
    if session is None:
        told = "\n".join(f"  {step}" for step in steps)
        raise LoadError(f"the model {name!r} cannot be opened here:\n{told}")
    return session


def explain(name: str, *, target: str | None = None, device: Device | None = None) -> list[Step]:
    """What `load` would do with the same arguments, step by step: it opens a session to know."""
    return [step for step, _ in _walk(name, target, device, None, {})]


def target_of(session: onnxruntime.InferenceSession) -> str:
    """The target on which `load` opened ``session``; "source" for the source model on the CPU."""
    return _targets[session]


def _manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((_folder / "epcontext.json").read_text("utf-8"))
    return manifest


def _walk(
    name: str,
    target: str | None,
    device: Device | None,
    session_options: Any,
    provider_options: Mapping[str, object],
) -> Iterator[tuple[Step, Any]]:
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
            yield Step(entry["target"], "not tried", ""), None
            continue
        try:
            session, how = _open(entry, device, session_options, provider_options)
        except _Skip as reason:
            yield Step(entry["target"], "skipped", str(reason)), None
        except Exception as error:
            yield Step(entry["target"], "failed", f"{type(error).__name__}: {error}"), None
        else:
            done = True
            _targets[session] = entry["target"]
            _keep_alive(session, entry)
            yield Step(entry["target"], "opened", how), session


def _keep_alive(session: Any, entry: dict[str, Any]) -> None:
    if entry["sharing"] is not None:
        group = _sharing.setdefault((entry["sharing"]["group"], entry["target"]), weakref.WeakSet())
        _before[session] = tuple(group)
        group.add(session)


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"there is no {what} {name!r} here.{hint} There are: {', '.join(known)}."


def _source_entry(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": SOURCE,
        "product": SOURCE,
        "ep": "CPUExecutionProvider",
        "device": "cpu",
        "device_filter": {},
        "policy": None,
        "plugin": None,
        "model_file": model["source"]["model_file"],
        "compatibility_string": "",
        "session_options": {},
        "provider_options": {},
        "sharing": None,
    }


def _open(
    entry: dict[str, Any],
    device: Device | None,
    session_options: Any,
    more: Mapping[str, object],
) -> tuple[Any, str]:
    """A session on the target of ``entry``, and on what it runs."""
    if entry["model_file"] is None:
        raise _Skip("the source model is not shipped")
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise _Skip(f"onnxruntime cannot be imported ({error})") from error
    wanted = device or entry["device"]
    if "any" not in (wanted, entry["device"]) and wanted != entry["device"]:
        raise _Skip(f"it is for the {entry['device']}, and {wanted} was asked for")
    options = session_options() if callable(session_options) else session_options
    options = options or ort.SessionOptions()
    for key, value in entry["session_options"].items():
        options.add_session_config_entry(key, value)
    path = _folder / entry["model_file"]
    given = {} if entry["target"] == SOURCE else more
    provider_options = {
        **{name: _in_user_cache(value) for name, value in entry["provider_options"].items()},
        **{
            name: str(int(value) if isinstance(value, bool) else value)
            for name, value in given.items()
        },
    }
    if entry["sharing"] is not None:
        options.add_session_config_entry("ep.share_ep_contexts", "1")
    if entry["plugin"] is None:
        return _open_built_in(ort, entry, path, options, provider_options)
    devices = _devices(ort, entry, wanted)
    verdict = _compatibility(devices, entry["compatibility_string"])
    if verdict == "EP_UNSUPPORTED":
        raise _Skip(f"{entry['ep']} does not support what it was compiled for on this machine")
    _forbid_compiling(entry, options)
    if entry["policy"] is None:
        # Devices of one EP are interchangeable here, and a session takes one.
        options.add_provider_for_devices(devices[:1], provider_options)
        how = f"{entry['ep']} on {_kind(devices[0])}"
    else:
        # A policy takes no options; this is where onnxruntime itself keeps those of an EP.
        for name, value in provider_options.items():
            options.add_session_config_entry(f"ep.{entry['ep'].lower()}.{name}", value)
        policy = entry["policy"].replace("-", "_").upper()
        options.set_provider_selection_policy(
            ort.OrtExecutionProviderDevicePolicy.__members__[policy]
        )
        how = f"{entry['ep']}, by the policy {entry['policy']}"
    session = ort.InferenceSession(path, options, enable_fallback=0)
    _see_that_it_has(session, entry["ep"])
    if verdict == "EP_SUPPORTED_PREFER_RECOMPILATION":
        how += ", which would be faster if compiled anew"
    return session, how


def _open_built_in(
    ort: Any, entry: dict[str, Any], path: Path, options: Any, provider_options: dict[str, str]
) -> tuple[Any, str]:
    """A session on an EP that is a part of onnxruntime's own distribution."""
    if entry["ep"] not in ort.get_available_providers():
        raise _Skip(f"this onnxruntime ({ort.__version__}) has no {entry['ep']}")
    _forbid_compiling(entry, options)
    providers = [(entry["ep"], provider_options)]
    session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
    _see_that_it_has(session, entry["ep"])
    return session, f"{entry['ep']} on {entry['device']}"


def _forbid_compiling(entry: dict[str, Any], options: Any) -> None:
    if entry["product"] == "context":
        # What would have to be compiled now is not what was shipped.
        options.add_session_config_entry("session.disable_model_compile", "1")


def _see_that_it_has(session: Any, ep: str) -> None:
    # An EP that misses a library is left out, and onnxruntime only logs it.
    if ep not in session.get_providers():
        raise _Skip(
            f"{ep} is not in the session; onnxruntime's log may say which library it misses"
        )


def _in_user_cache(value: str) -> str:
    """``value`` with ``{user-cache}`` replaced by the app's own folder, in which its folder is made."""
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
    offered = [each for each in _offered(ort, entry) if _passes(each, entry["device_filter"])]
    if wanted == "any":
        fitting = [each for each in offered if _kind(each) == entry["device"]]
        if not fitting and entry["sharing"] is not None and entry["sharing"]["needs_device"]:
            raise _Skip(f"contexts that share weights need the {entry['device']} itself")
        fitting = fitting or offered
    else:
        fitting = [each for each in offered if _kind(each) == wanted]
    if not fitting:
        there = ", ".join(sorted({_kind(each) for each in offered}))
        raise _Skip(
            f"{entry['ep']} finds no {'device' if wanted == 'any' else wanted} here"
            + (f", only {there} (device='any' would take it)" if there else "")
        )
    return fitting


def _passes(device: Any, wanted: Mapping[str, str]) -> bool:
    """Whether nothing that is known of ``device`` is other than what the target was compiled for."""
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
    """The devices of the entry's EP, whose library is registered if need be: once per process."""
    if not hasattr(ort, "get_ep_devices"):
        raise _Skip(f"onnxruntime {ort.__version__} is too old for {entry['ep']}")
    with _registering:
        offered = [each for each in ort.get_ep_devices() if each.ep_name == entry["ep"]]
        plugin = entry["plugin"]
        if offered:
            return offered
        if not plugin["module"]:
            raise _Skip(
                f"{entry['ep']} is not registered; the app has to call "
                "onnxruntime.register_execution_provider_library before"
            )
        try:
            module = importlib.import_module(plugin["module"])
        except ImportError as error:
            raise _Skip(f"{plugin['package']} is not installed ({error})") from error
        try:
            ort.register_execution_provider_library(
                plugin["registration_name"], module.get_library_path()
            )
        except Exception as error:
            raise _Skip(f"the library of {plugin['package']} cannot be loaded ({error})") from error
        return [each for each in ort.get_ep_devices() if each.ep_name == entry["ep"]]


def _compatibility(devices: list[Any], compatibility: str) -> str:
    """The EP's own word on whether it can run what it compiled; "" if it has none."""
    try:
        from onnxruntime.capi._pybind_state import get_model_compatibility_for_ep_devices
    except ImportError:
        return ""
    if not compatibility:
        return ""
    try:
        return str(get_model_compatibility_for_ep_devices(devices, compatibility).name)
    except Exception as error:
        # Some EPs raise when asked about a device that only simulates theirs: no verdict.
        _log.debug("no word on compatibility: %s", error)
        return ""

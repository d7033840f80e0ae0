# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Finds what onnxruntime-genai runs on this machine of a language model in this package.

A copy of ``hatch_epcontext/_genai.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hatch_epcontext.loader import Device

_CONFIG = "genai_config.json"
# The file in a target's folder with what it changes of the configuration.
_OVERLAY = "overlay.json"
# `<ir_version: 8, opset_import: ["" : 13]> g (float[1] x) => (float[1] y) { y = Identity (x) }` of ONNX.
_IDENTITY = (
    b'\x08\x08:9\n\x12\n\x01x\x12\x01y"\x08Identity:\x00\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


class GenaiFolder(NamedTuple):
    """A folder for ``onnxruntime_genai.Config``, and the JSON that the ``target`` changes of it."""

    folder: str
    overlay: str
    target: str

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its answer, whatever fills the last chunk of the prompt."""
        own = json.loads(Path(self.folder, _CONFIG).read_bytes())
        overlay = json.loads(self.overlay)
        window = own["model"]["decoder"].get("sliding_window") or {}
        window = {**window, **overlay["model"].get("decoder", {}).get("sliding_window", {})}
        length = own["model"]["context_length"]
        search = {**own.get("search", {}), **overlay.get("search", {})}
        most = int(search.get("max_length") or length)
        return (
            most - window["window_size"] + 1 if window.get("slide_inputs", bool(window)) else most
        )

    def config(self) -> Any:
        """The ``onnxruntime_genai.Config`` for ``onnxruntime_genai.Model``."""
        config = importlib.import_module("onnxruntime_genai").Config(self.folder)
        config.overlay(self.overlay)
        # An overlay does not change the EPs of a model that is one file.
        config.clear_providers()
        decoder = json.loads(self.overlay)["model"].get("decoder", {})
        for name, options in _options(decoder):
            config.append_provider(name)
            for option, value in options.items():
                config.set_provider_option(name, option, value)
        return config


def _options(part: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The EPs of a decoder or of a stage, by onnxruntime-genai's names, with their options."""
    entries = part.get("session_options", {}).get("provider_options", [])
    return [item for entry in entries for item in entry.items()]


def genai_folder(
    name: str,
    *,
    target: str | None = None,
    device: Device | None = None,
    package: str | os.PathLike[str] | None = None,
    windows_ml: bool = False,
) -> GenaiFolder:
    """The folder of the language model ``name`` for the first target whose device this machine has.

    The arguments are those of ``load``; the last target is the plain folder on the CPU. The library of the EP
    is registered in onnxruntime and, once in a process, in onnxruntime-genai. Nothing is opened.

    Raises LoadError if no target fits, or if ``name`` is no language model of the package.
    """
    assert __package__, "this module is in the package with the models"
    loader: Any = importlib.import_module(__package__)
    request = loader.Request(target, device, package=package, windows_ml=windows_ml)
    candidates, request = loader._resolve_request(name, request)  # noqa: SLF001
    # The stages of a pipeline are models of their own, after the source.
    candidates.sort(key=lambda candidate: candidate[0][0].target == loader.SOURCE)
    attempts = []
    for (variant, *_), _ in candidates:
        root, is_source = variant.package.root, variant.target == loader.SOURCE
        # In an editable install the source is the project's own.
        is_plain = variant.about.get("product") == loader.SOURCE
        home = variant.component if is_plain else variant.folder.partition("/")[0]
        folder = root / variant.folder if is_plain else root / home
        if variant.problem is None and not (folder / _CONFIG).is_file():
            raise loader.LoadError(f"{name!r} is no language model of {root}")
        try:
            if variant.problem is not None:
                raise variant.problem  # noqa: TRY301
            overlay = json.loads((root / home / variant.target / _OVERLAY).read_bytes())
            if not is_source:
                _register_ep(loader.Opener(variant, request), overlay)
        except (ImportError, loader.SkipTargetError) as error:
            outcome, reason = loader.Outcome.SKIPPED, str(error)
        except Exception as error:
            outcome, reason = loader.Outcome.FAILED, f"{type(error).__name__}: {error}"
        else:
            return GenaiFolder(str(folder), json.dumps(overlay), variant.target)
        attempts.append(loader.TargetAttempt(variant.target, outcome, reason))
        loader.log("info", f"{name} on {attempts[-1]}")
    raise loader.LoadError(f"the model {name!r} cannot be opened on this machine:", attempts)


def _register_ep(opener: Any, overlay: dict[str, Any]) -> None:
    """Check that the device is there, register its EP, and complete the options in ``overlay``."""
    variant = opener.variant
    variant.package.on_disk(variant)
    opener.check()
    library = _find_ep(opener)
    with opener.lock:
        genai = importlib.import_module("onnxruntime_genai")
        for name, _ in _eps(overlay):
            is_available = getattr(genai, f"is_{name.lower()}_available", None)
            if is_available is not None and not is_available():
                raise ImportError(f"the installed onnxruntime-genai does not contain {name}")
        try:
            if library and variant.plugin:
                name = variant.plugin["registration_name"]
                genai.register_execution_provider_library(name, library)
        except Exception as error:
            # It is there from an earlier call, or from the app.
            if "already registered" not in str(error):
                raise
    for _, options in _eps(overlay):
        options.update(opener._provider_options())  # noqa: SLF001


def _find_ep(opener: Any) -> str:
    """The path of the EP's library, empty for an EP that onnxruntime contains."""
    if not opener.variant.plugin and opener.variant.ep in opener.ort.get_available_providers():
        # onnxruntime lists no devices of such an EP: whether they and its libraries are there, opening says.
        opener.open(_IDENTITY)
        return ""
    with opener.lock:
        # As for a session, which is not opened: that is how the loader compares chips too.
        opener._add_devices(opener.ort.SessionOptions(), {})  # noqa: SLF001
        return str(opener.find_devices()[0].ep_metadata.get("library_path", ""))


def _eps(overlay: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The EPs of the decoder, or of all stages of the pipeline, in ``overlay``."""
    decoder = overlay["model"]["decoder"]
    stages = [stage for entry in decoder.get("pipeline", ()) for stage in entry.values()]
    return [ep for part in stages or [decoder] for ep in _options(part)]

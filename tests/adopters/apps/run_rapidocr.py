"""rapidocr-onnxruntime: the text in a picture, which this draws, with its places and scores."""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rapidocr_onnxruntime import RapidOCR
from watch import report, timed, watch

LINES = ("Invoice 2024-117", "Total: 1,280.50 EUR", "Thank you for your order")

(device,) = sys.argv[1:]
targets = watch("rapidocr_onnxruntime", device)
picture = Image.new("RGB", (480, 360), "white")
draw = ImageDraw.Draw(picture)
for index, line in enumerate(LINES):
    draw.text((40, 60 + 90 * index), line, "black", ImageFont.load_default(32))
engine, opened = timed(RapidOCR)
found, _ = engine(np.asarray(picture))
report(
    targets=targets(),
    opened={"engine": opened},
    drawn=LINES,
    texts=[text for _, text, _ in found],
    scores=[float(score) for *_, score in found],
    boxes=[box for box, *_ in found],
)

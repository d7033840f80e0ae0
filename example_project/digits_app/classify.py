"""Reads an image, and finds the digit in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import onnxruntime
    from numpy.typing import NDArray

SIZE = 8


def read_image(path: str | Path) -> NDArray[np.float32]:
    """The image at ``path`` as the model's input: float32, 1 x 1 x 8 x 8, from 0 (paper) to 1 (ink)."""
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L").resize((SIZE, SIZE), Image.Resampling.BOX))
    ink = grey.astype(np.float32) / 255
    # Most of the border is paper, so an image with a bright border has dark digits: invert it.
    border = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
    if np.median(border) > 0.5:
        ink = 1 - ink
    return ink.reshape(1, 1, SIZE, SIZE)


def classify(
    session: onnxruntime.InferenceSession, image: NDArray[np.float32]
) -> tuple[int, float]:
    """The digit in ``image`` (float32, 1 x 1 x 8 x 8), and the model's confidence from 0 to 1."""
    (logits,) = session.run(["logits"], {"image": image})
    odds = np.exp(logits[0] - logits[0].max())
    digit = int(odds.argmax())
    return digit, float(odds[digit] / odds.sum())

"""An image of a digit -> the digit."""

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
    """The image at ``path`` as the model takes it: float32, 1 x 1 x 8 x 8, from 0 (paper) to 1 (ink)."""
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L").resize((SIZE, SIZE), Image.Resampling.BOX))
    ink = grey.astype(np.float32) / 255
    # Paper is what most of the border shows: dark digits on white paper are turned over.
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

"""What the names and the shapes of inputs say by convention: masks, lengths, images."""

from __future__ import annotations

import math
import re

from hatch_epcontext.graph.facts import Size, TensorFacts

DEVIATIONS = 8.0
"""The range, in standard deviations, of floats that nothing bounds."""

LARGEST_OF_32_BITS = 2.0**31 - 1
"""Larger integers are left to what EPs declare."""

SCALING = 1 / 64
"""The factor from which on down a graph scales large numbers: attention divides by the root of up to 4096."""

USUAL_UNITS = 100.0
"""How many units quantities have in what a graph counts or converts them to: 100 days of hours, or 100 years.
A judgment: dates, ages and sensors have as many, and float16 has all integers up to 20 times that.
"""

MAX_OF_BYTES = 255.0
"""The largest value of a pixel, and of an integer that nothing bounds."""

_MASK = re.compile(r"mask", re.IGNORECASE)
_LENGTH = re.compile(
    r"(^|[^a-z])(len|lens|length|lengths|seqlens?|num_?frames|n_?frames|num_?samples)([^a-z]|$)",
    re.IGNORECASE,
)
_NO_IMAGE = re.compile(
    r"mel|spec|feat|fbank|mfcc|audio|wave?|signal|latent|noise|past|cache|state", re.IGNORECASE
)

_SCALE = re.compile(r"scale|speed|temperature|rate", re.IGNORECASE)
"""Names of factors around 1."""

_MAX_SCALES = 8

_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)
_ALONG = re.compile(
    r"len|seq|time|frame|sample|token|word|char|phoneme|step|num_|points|^t$", re.IGNORECASE
)
_STATE = re.compile(r"^(h|c|hn|cn|h_?[0n]|c_?[0n])$|hidden|cell|state", re.IGNORECASE)

_LAYOUTS = ((1, (2, 3)), (3, (1, 2)))
"""The axes of the channels, and of height and width, of images."""

_CHANNELS = (1, 3, 4)

_MIN_IMAGE = 8
"""The smallest number of pixels along a side."""

_MIN_SOUND, _STEREO = 256, 2
"""The smallest number of samples of sound: 16 ms. Its channels, if there are several."""


def is_mask_name(name: str) -> bool:
    """Whether an input with this name is a mask."""
    return bool(_MASK.search(name))


def is_length_name(name: str) -> bool:
    """Whether an input with this name gives the length of another one."""
    return bool(_LENGTH.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)))


def is_scale(facts: TensorFacts) -> bool:
    """Whether a float input contains only a few factors."""
    sizes = [size for size in facts.sizes if isinstance(size, int)]
    few = facts.is_fixed and math.prod(sizes) <= _MAX_SCALES
    return few and bool(_SCALE.search(facts.name))


def looks_like_image(facts: TensorFacts) -> bool:
    """Whether this input of a convolution is an image, with the channels first or last."""
    sides = [facts.sizes[axis] for axis in _sides(facts)]
    return bool(sides) and all(not isinstance(n, int) or n >= _MIN_IMAGE for n in sides)


def looks_like_sound(facts: TensorFacts) -> bool:
    """Whether this input of a filter has one long axis, perhaps for two channels."""
    *channels, length = sorted((size for size in facts.sizes if size != 1), key=_as_number) or [0]
    return channels in ([], [_STEREO]) and isinstance(length, int) and length >= _MIN_SOUND


def _as_number(size: Size) -> float:
    return size if isinstance(size, int) else math.inf


def is_batch(facts: TensorFacts, axis: int, *, is_state: bool = False) -> bool:
    """Whether the open dimension ``axis`` of an input is a batch, as far as its name and position show it.

    ``is_state``: whether the input is the state of a recurrent layer.
    """
    name, rank = facts.sizes[axis], len(facts.sizes)
    if isinstance(name, str) and (_BATCH.search(name) or _ALONG.search(name)):
        return _BATCH.search(name) is not None
    if rank == 3 and axis == 1 and (is_state or _STATE.search(facts.name)):
        return True
    return axis == 0 and (rank > 1 or is_length_name(facts.name))


def _sides(facts: TensorFacts) -> tuple[int, ...]:
    """The axes of height and width, if the input can be images."""
    if len(facts.sizes) == 4 and not _NO_IMAGE.search(facts.name):
        for channels, sides in _LAYOUTS:
            if facts.sizes[channels] in _CHANNELS:
                return sides
    return ()

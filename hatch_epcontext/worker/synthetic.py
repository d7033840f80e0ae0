"""Values of synthetic inputs: arrays with a range and a nature, the same in every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.graph.dtypes import Array, Numbers, is_float, numpy_dtype
from hatch_epcontext.graph.facts import Far, Range, TensorFacts
from hatch_epcontext.graph.values.conventions import DEVIATIONS

_SEED = 20240229

_WORDS = ("alpha", "beta")

_LEVELS = (0.01, 1e-3, 1e-4, 1e-5, 0.1, 1.0)
"""The levels of floats that nothing bounds, from near silence to full scale, in the order of samples."""

QUIET, FAINT = 1e-2, 1e-3
"""The level from which such floats are usual; only sound has lower ones. That to which others decay."""

NEAR = 2.0**-8
"""The distance from a threshold, relative to it, at which rounding to 8 bits and more moves no number over
it: values so near it are rare, and say nothing of others.
"""

_NOISES = frozenset({"random", "pink", "burst", "sorted"})
_SPEECH = 0.05
"""The level of noises as sound, relative to full scale: that of speech."""

_FEW = 64
"""The number of values of which one alone is as loud as the others in `Range.least`."""

_SPECIAL = 4
"""The number of first indices that tokenizers reserve for special tokens; they reserve the last one too."""

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """The natures of synthetic values by name: of sound and features, of pictures, and of integers.

    ``level``: the factor of floats that nothing bounds. ``usual``: whether an app can have such floats; not
    for constants, silence, and values that are too large. Noises as sound are `_SPEECH` times as loud.
    """

    signal: str
    picture: str
    ids: str
    level: float = 1.0
    usual: bool = True

    def faintest(self, count: int) -> float:
        """The level to which most of ``count`` such floats fall, or to which their powers do."""
        # The mean of squares of a spike among many is small.
        share = min(1.0, math.sqrt(_FEW / count)) if self.signal == "spike" else 1.0
        return self.level * (1 / 100 if self.signal == "decay" else share)

    def suits(self, ranges: Iterable[Range]) -> bool:
        """Whether an app can have such inputs with these ``ranges``: not pictures without structure, nor
        sound at full scale.
        """
        varying = [r for r in ranges if r.usual is None and (not r.whole or r.picture)]
        signals = [range_ for range_ in varying if range_.is_open]
        is_full = self.level >= 1 and self.signal not in _NOISES
        is_loud = is_full and any(range_.sound for range_ in signals)
        is_flat = len(signals) < len(varying) and self.picture in _ONE_COLOUR
        is_flat |= self.picture not in _STRUCTURED and any(range_.picture for range_ in varying)
        return (self.usual or not signals) and not (is_loud or is_flat)

    def nature(self, ranges: Iterable[Range]) -> str:
        """The nature of inputs with these ``ranges``, whatever their level."""
        natures = (self._nature(range_) for range_ in ranges)
        return ", ".join(dict.fromkeys(filter(None, natures)))

    def _nature(self, range_: Range) -> str:
        if range_.usual is not None:
            return ""
        if range_.whole and not range_.picture:
            return self.ids
        return self.signal if range_.is_open else self.picture


def assumed_range(facts: TensorFacts) -> Range:
    """The range of an input without a known graph: 0 and 1 are indices in every table."""
    if facts.dtype == "string" or not _is_real(facts):
        return Range(0.0, 1.0, known=False, whole=True)
    return Range(-DEVIATIONS, DEVIATIONS, known=False)


def _is_real(facts: TensorFacts) -> bool:
    dtype = numpy_dtype(facts.dtype)
    return is_float(dtype) or dtype.kind == "c"


def values(pattern: Pattern, facts: TensorFacts, range_: Range, rng: np.random.Generator) -> Array:
    """Return an array for the input ``facts``, whose open dimensions have the size 1.

    An input with a usual value, such as a length, always gets it, and a mask may end early. Raises TypeError
    for a dtype that NumPy and ml_dtypes lack.
    """
    shape = tuple(size if isinstance(size, int) else 1 for size in facts.sizes)
    if facts.dtype == "string":
        chosen = rng.integers(0, 2, shape) if pattern.ids == "random" else np.zeros(shape, int)
        return np.asarray(np.array(_WORDS, dtype=object)[chosen], dtype=object)
    dtype = numpy_dtype(facts.dtype)
    if range_.usual is not None:
        usual = np.full(shape, range_.usual)
        if pattern.ids == "padded" and _is_padding_mask(range_, shape):
            usual[..., shape[-1] - shape[-1] // 2 :] = range_.low
        return usual.astype(dtype)
    array = np.asarray(_of_range(pattern, shape, range_, rng))
    if range_.thresholds:
        thresholds, least = np.array(range_.thresholds), 0.75 if range_.whole else 0.0
        array = _moved_away(array.astype(np.float64), thresholds, least)
    if range_.thresholds and range_.whole:
        array = np.clip(np.rint(array), range_.low, range_.high)
    return array.astype(dtype)


def _moved_away(numbers: Numbers, thresholds: Numbers, distance: float) -> Numbers:
    """``numbers`` at a ``distance`` from all ``thresholds``, on the same side of these after rounding."""
    indices = np.searchsorted(thresholds, numbers)
    for offset in (-1, 0):
        nearest = thresholds[np.clip(indices + offset, 0, len(thresholds) - 1)]
        away = numbers - nearest
        least = np.maximum(NEAR * np.abs(nearest), distance)
        moved = nearest + np.where(away < 0, -least, least)
        numbers = np.where(np.abs(away) < least, moved, numbers)
    return numbers


def generator(number: int = 0) -> np.random.Generator:
    """Random numbers that are the same in every run, for the sample with this ``number``."""
    return np.random.default_rng([_SEED, number] if number else _SEED)


def generated_inputs(
    pattern: Pattern,
    inputs: Iterable[TensorFacts],
    ranges: Mapping[str, Range],
    rng: np.random.Generator,
    *,
    frames: int | None = None,
) -> dict[str, Array]:
    """Return synthetic values for ``inputs``, whose open dimensions have the size 1; see `values`.

    With ``frames`` the arrays have a first axis of that size, along which signals continue.
    """
    if frames is not None:
        inputs = [replace(tensor, shape=(frames, *tensor.sizes)) for tensor in inputs]
    return {
        tensor.name: values(pattern, tensor, ranges.get(tensor.name) or assumed_range(tensor), rng)
        for tensor in inputs
    }


def _of_range(
    pattern: Pattern, shape: _Shape, range_: Range, rng: np.random.Generator
) -> NDArray[np.generic]:
    if range_.whole and not range_.picture:
        return _IDS[pattern.ids](shape, int(range_.low), int(range_.high), rng)
    if range_.is_open:
        # The range is eight standard deviations wide on either side.
        signal = _SIGNALS[pattern.signal](math.prod(shape), rng)
        signal = signal if range_.signed else np.abs(signal)
        loudness = _SPEECH if range_.sound and pattern.signal in _NOISES else 1.0
        numbers = signal.reshape(shape) * (pattern.level * loudness * range_.high / DEVIATIONS)
        return standardized(numbers, range_)
    share = np.clip(_PICTURES[pattern.picture](shape, rng), 0.0, 1.0)
    numbers = range_.low + share * (range_.high - range_.low)
    return np.rint(numbers) if range_.whole else numbers


def standardized(numbers: Numbers, range_: Range) -> Numbers:
    """Of which a graph makes ``numbers``, if it standardizes an input with this range; else these."""
    if (means := range_.standardized) is None:
        return numbers
    center, spread = (np.reshape(n, means.shape) for n in (means.centers, means.spreads))
    return np.asarray(center + spread * numbers)


def far_values(facts: TensorFacts, far: Far, rng: np.random.Generator) -> Array:
    """Return an array for the input ``facts``, which is sized, with values that are ``far`` from ordinary."""
    shape = tuple(size if isinstance(size, int) else 1 for size in facts.sizes)
    dtype = numpy_dtype(facts.dtype)
    if far.centers:
        if len(far.centers) > 1 and not far.shape:
            center, spread = rng.choice(far.centers, shape), np.asarray(far.spreads[0])
        else:
            center, spread = (
                np.reshape(numbers, far.shape) for numbers in (far.centers, far.spreads)
            )
        numbers = center + spread * rng.standard_normal(shape)
        if far.unit:
            numbers = np.rint(numbers / far.unit) * far.unit
        if far.low < far.high:
            numbers = np.clip(numbers, far.low, far.high)
        return np.asarray(numbers if _is_real(facts) else np.rint(numbers)).astype(dtype)
    if far.is_larger:
        least = min(3 * far.low, 0.75 * far.high)
        numbers = rng.uniform(least, far.high, shape)
        return (_between(numbers) if far.is_counted and is_float(dtype) else numbers).astype(dtype)
    # As many small ones as large ones.
    sizes = np.exp(rng.uniform(0, np.log1p(max(-far.low, far.high)), shape)) - 1
    signs = rng.choice((-1.0, 1.0), shape) if far.low < 0 else np.ones(shape)
    return np.asarray(np.clip(np.rint(signs * sizes), far.low, far.high)).astype(dtype)


def _between(numbers: Numbers) -> Numbers:
    """Nearly in the middle between two float16s: of one value others may be right by chance."""
    distance = 2.0 ** (np.floor(np.log2(numbers)) - 10)
    return np.asarray((np.floor(numbers / distance) + 0.49) * distance)


def _is_padding_mask(range_: Range, shape: _Shape) -> bool:
    is_mask = (range_.low, range_.high, range_.usual) == (0, 1, 1)
    return is_mask and len(shape) > 1 and shape[-1] > 1


def patterns() -> Iterator[Pattern]:
    """Yield about eighty: the most different ones first, then all levels of signals."""
    yield RANDOM
    first = (
        ("zeros", 1.0, False),
        ("pink", 1.0, True),
        ("tone", 0.1, True),
        ("spike", 1.0, True),
        ("low tone", 1.0, True),
        ("decay", 0.1, True),
        ("burst", 1.0, True),
        ("random", 1e-3, False),
        ("constant", 1.0, False),
        ("ramp", 1.0, True),
        ("square", 0.1, True),
        ("negative zeros", 1.0, False),
        ("random", DEVIATIONS, False),
        ("sorted", 1.0, True),
    )
    levels = (
        (name, level, name != "constant" and level >= QUIET) for level in _LEVELS for name in _LOUD
    )
    signals = [*first, *(signal for signal in levels if signal not in first)]
    pictures, ids = [*_PICTURES][1:], [*_IDS][1:]
    for index, (signal, level, usual) in enumerate(signals):
        yield Pattern(signal, pictures[index % len(pictures)], ids[index % len(ids)], level, usual)


RANDOM = Pattern("random", "random", "random")

_Signal = Callable[[int, np.random.Generator], Numbers]


def _times(count: int) -> Numbers:
    return np.arange(count, dtype=np.float64)


def _pink(count: int, rng: np.random.Generator) -> Numbers:
    """Noise whose power falls with its frequency, as in speech and music."""
    if not count:
        return np.zeros(0)
    frequencies = np.fft.rfftfreq(count)
    frequencies[0] = frequencies[1] if count > 1 else 1.0
    noise = np.fft.irfft(_complex(frequencies.shape, rng) / np.sqrt(frequencies), count)
    return np.asarray(3 * noise / max(np.abs(noise).max(), 1e-9))


def _complex(shape: _Shape, rng: np.random.Generator) -> NDArray[np.complex128]:
    return np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape))


def _tone(frequency: float) -> _Signal:
    return lambda count, rng: np.sin(2 * np.pi * frequency * _times(count) + 0.3)


def _spike(count: int, rng: np.random.Generator) -> Numbers:
    return np.where(_times(count) == count // 3, 1.0, 0.0)


_SIGNALS: Mapping[str, _Signal] = {
    "random": lambda count, rng: rng.standard_normal(count),
    "zeros": lambda count, rng: np.zeros(count),
    "negative zeros": lambda count, rng: np.full(count, -0.0),
    "constant": lambda count, rng: np.ones(count),
    "sorted": lambda count, rng: np.sort(rng.standard_normal(count)),
    "pink": _pink,
    "tone": _tone(0.02),
    "low tone": _tone(0.003),
    "high tone": _tone(0.15),
    "spike": _spike,
    "burst": lambda count, rng: np.where(
        _times(count) > count // 2, rng.standard_normal(count), 0.0
    ),
    "ramp": lambda count, rng: np.linspace(-1, 1, count),
    # By 60 dB, as sound decays in a room.
    "decay": lambda count, rng: np.exp(-7 * _times(count) / count) * _tone(0.02)(count, rng),
    "square": lambda count, rng: np.sign(np.sin(0.02 * np.pi * _times(count) + 0.1)),
}
"""Floats that nothing bounds, such as sound and features; full scale is 1."""

_LOUD = tuple(name for name in _SIGNALS if name not in ("zeros", "negative zeros", "sorted"))

_Picture = Callable[[_Shape, np.random.Generator], Numbers]


def _in_plane(make: Callable[[int, int, np.random.Generator], Numbers]) -> _Picture:
    """Pictures that ``make`` draws of a height and a width: the two largest of neighbouring axes."""

    def picture(shape: _Shape, rng: np.random.Generator) -> Numbers:
        if len(shape) < 2:
            return make(1, math.prod(shape), rng).reshape(shape)
        axis = max(range(len(shape) - 1), key=lambda axis: min(shape[axis : axis + 2]))
        plane = make(shape[axis], shape[axis + 1], rng)
        wide = [*[1] * axis, *plane.shape, *[1] * (len(shape) - axis - 2)]
        return np.broadcast_to(plane.reshape(wide), shape)

    return picture


def _clouds(height: int, width: int, rng: np.random.Generator) -> Numbers:
    """Structure of all sizes, as photographs have it."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequencies[0, 0] = 1 / max(height, width)
    clouds = np.fft.irfft2(_complex(frequencies.shape, rng) / frequencies, (height, width))
    clouds -= clouds.min()
    return np.asarray(clouds / max(clouds.max(), 1e-9))


def _boxes(height: int, width: int, rng: np.random.Generator) -> Numbers:
    """Edges of all sizes: boxes of one grey each, small ones before large ones, as things hide each other."""
    picture = np.full((height, width), rng.random())
    # With Python's own numbers, which take two thirds of the time.
    for exponent in np.linspace(1, 6, 128).tolist():
        sides = (size * 2.0 ** (2 * rng.random() - 1 - exponent) for size in (height, width))
        high, wide = (1 + int(side) for side in sides)
        top, left = int(rng.integers(1 - high, height)), int(rng.integers(1 - wide, width))
        picture[max(top, 0) : top + high, max(left, 0) : left + wide] = rng.random()
    return picture


def _text(height: int, width: int, rng: np.random.Generator) -> Numbers:
    """Black on white, lines of letters that have up to six strokes each; dots where there is no room."""
    dot = 1 + min(height, width) // 150
    lines, letters = height // (12 * dot), width // (6 * dot)
    if not lines or not letters:
        return (rng.random((height, width)) > 0.1).astype(np.float64)
    strokes = rng.random((6, lines, letters, 1)) < 0.5
    # Between words there are spaces.
    strokes &= rng.random((lines, letters, 1)) > 0.15
    ink = np.zeros((lines, letters, 12, 6), bool)
    for number, place in enumerate((0, 3, 6)):
        ink[:, :, 2 + place, :5] |= strokes[number]
    for number, place in enumerate((0, 2, 4)):
        ink[:, :, 2:9, place] |= strokes[3 + number]
    dots = ink.transpose(0, 2, 1, 3).reshape(12 * lines, 6 * letters)
    page = np.ones((height, width))
    page[: 12 * dot * lines, : 6 * dot * letters] -= np.kron(dots, np.ones((dot, dot)))
    return page


def _flat(share: float) -> _Picture:
    return lambda shape, rng: np.full(shape, share)


_PICTURES: Mapping[str, _Picture] = {
    "random": lambda shape, rng: rng.uniform(size=shape),
    "clouds": _in_plane(_clouds),
    "black": _flat(0.0),
    "boxes": _in_plane(_boxes),
    "text": _in_plane(_text),
    "gradient": _in_plane(
        lambda height, width, rng: np.broadcast_to(np.linspace(0, 1, width), (height, width))
    ),
    "white": _flat(1.0),
    "dark noise": lambda shape, rng: 0.05 * rng.uniform(size=shape),
    # Not in the middle between two numbers of eight bits.
    "grey": _flat(128 / 255),
    "spot": lambda shape, rng: _spike(math.prod(shape), rng).reshape(shape),
    "sorted": lambda shape, rng: np.sort(rng.uniform(size=math.prod(shape))).reshape(shape),
    "other clouds": _in_plane(_clouds),
    "half noise": lambda shape, rng: 0.5 * rng.uniform(size=shape),
    "nearly black": _flat(0.01),
}
"""Shares, from 0 to 1, of a range of floats that the graph bounds."""

_ONE_COLOUR = frozenset({"black", "white", "grey", "nearly black"})

_STRUCTURED = frozenset({"random", "clouds", "boxes", "text", "other clouds"})
"""Those that an image can be: they have edges, or structure of all sizes, but for one of noise."""

_Ids = Callable[[_Shape, int, int, np.random.Generator], NDArray[np.int64]]


def _random_ids(shape: _Shape, low: int, high: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Integers from ``low`` to ``high``: all of them, if there is room."""
    flat = rng.integers(low, high, shape, endpoint=True).reshape(-1)
    if flat.size > high - low:
        flat[: high - low + 1] = np.arange(low, high + 1)
    elif flat.size > 1:
        flat[:2] = low, high
    rng.shuffle(flat)
    return flat.reshape(shape)


def _listed(make: Callable[[int, int, np.random.Generator], Iterable[float]]) -> _Ids:
    """Integers from 0 that ``make`` yields for a count and a size of the range, moved into the range."""

    def ids(shape: _Shape, low: int, high: int, rng: np.random.Generator) -> NDArray[np.int64]:
        numbers = np.fromiter(make(math.prod(shape), high - low + 1, rng), np.int64)
        return (low + numbers % (high - low + 1)).reshape(shape)

    return ids


def _special(count: int, size: int, rng: np.random.Generator) -> Iterable[float]:
    """The special tokens, then ordinary ones, and the last special one at the end."""
    ids = rng.integers(0, size, count)
    ids[:_SPECIAL] = np.arange(_SPECIAL)[:count]
    ids[-1:] = size - 1
    return ids


def _sparse(count: int, size: int, rng: np.random.Generator) -> Iterable[float]:
    """Zeros with a few others, as in recordings of silence and pictures."""
    return np.where(rng.random(count) < 1 / 32, rng.integers(0, size, count), 0)


def _few(number: int) -> _Ids:
    return _listed(lambda count, size, rng: np.resize(rng.integers(0, size, number), count))


def _all(index: int) -> _Ids:
    return _listed(lambda count, size, rng: np.full(count, index % size))


_IDS: Mapping[str, _Ids] = {
    "random": _random_ids,
    "special": _listed(_special),
    "padded": _listed(
        lambda count, size, rng: rng.integers(0, size, count) * (_times(count) < count - count // 2)
    ),
    "sparse": _listed(_sparse),
    "ascending": _listed(lambda count, size, rng: np.arange(count)),
    "zipf": _listed(lambda count, size, rng: np.minimum(rng.zipf(1.5, count), size - 1)),
    "in runs": _listed(
        lambda count, size, rng: np.repeat(rng.integers(0, size, count // 8 + 1), 8)[:count]
    ),
    "all the lowest": _all(0),
    "all the highest": _all(-1),
    "two in turn": _few(2),
    "all the same": _few(1),
    "sorted": _listed(lambda count, size, rng: np.sort(rng.integers(0, size, count))),
    "seven in turn": _few(7),
    "other random": _random_ids,
}
"""Integers of a range, such as indices of words or bytes."""

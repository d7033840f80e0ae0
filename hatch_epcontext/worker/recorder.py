"""Keeps inputs of the project's models in an app: `epcontext record` puts a copy of this module on its path.

Python imports the copy as ``sitecustomize`` when it starts, in the app's own environment, where this package
need not be installed. Beside the copy is `SETTINGS`. Each process of the app gets a folder there, named by
its id, with its `REPORT`, and ``<model>/<sample>-<step>.npz``. No error of this module reaches the app.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"
REPORT = "report.json"

SAMPLES = 8
"""The most samples that are kept of a model; of a recurrent one each has `_STEPS` consecutive steps."""

_STEPS = 8
_MAX_BYTES = 2**30
"""The most bytes that are kept of a model, unless one sample has more."""

_MAX_STATE = 2**24
"""The most bytes of an output that is compared with later inputs, to find states."""

_COLLECTION = "onnxruntime.capi.onnxruntime_inference_collection"
"""The module of `onnxruntime.InferenceSession`."""

_CPU = "CPUExecutionProvider"

_UNSEEN = ("run_async", "run_with_iobinding", "run_with_ort_values")
"""Methods whose inputs are not recorded: most are on a device."""

Arrays = dict[str, Any]


class _Sequence:
    """Consecutive steps of a model; ``number`` is None if they are not kept."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.steps = 1


class _Kept:
    """The samples of a model that this process keeps: those that are farthest from each other.

    ``states``: the inputs that got an output of the run before, each with that output.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.runs = self.other_sizes = 0
        self.states: dict[str, str] = {}
        self._features: dict[int, list[float]] = {}
        self._bounds: list[tuple[float, float]] = []
        self._numbers = itertools.count(1)
        self._folder: Path | None = None

    def begin(self, arrays: Arrays, process: Path) -> _Sequence:
        """Keep ``arrays`` as the first step of a sample, unless the kept ones differ more."""
        self._folder = process / str(self.settings["name"])
        found = _features(arrays)
        if len(found) != len(self._bounds):
            self._bounds = [(value, value) for value in found]
        self._bounds = [
            (min(low, value), max(high, value))
            for (low, high), value in zip(self._bounds, found, strict=True)
        ]
        if any(self._distance(found, each) == 0 for each in self._features.values()):
            return _Sequence(None)
        number = next(self._numbers)
        self._features[number] = found
        size = sum(array.nbytes for array in arrays.values())
        if len(self._features) > max(1, min(SAMPLES, _MAX_BYTES // max(1, size))):
            dropped = self._least_telling()
            del self._features[dropped]
            if dropped == number:
                return _Sequence(None)
            for file in self._folder.glob(f"{dropped}-*.npz"):
                file.unlink()
        self._write(arrays, number, 1)
        return _Sequence(number)

    def _least_telling(self) -> int:
        """The sample whose removal leaves the others farthest from each other; never the first one."""
        numbers = list(self._features)
        distances = {
            pair: self._distance(*map(self._features.__getitem__, pair))
            for pair in itertools.combinations(numbers, 2)
        }

        def others(number: int) -> tuple[float, float]:
            rest = [each for pair, each in distances.items() if number not in pair]
            return min(rest, default=0.0), sum(rest)

        return max(numbers[1:], key=others)

    def add(self, arrays: Arrays, sequence: _Sequence) -> None:
        """Keep ``arrays`` as the next step of ``sequence``, if that is still kept."""
        sequence.steps += 1
        if sequence.number in self._features:
            self._write(arrays, sequence.number, sequence.steps)

    def _distance(self, one: Sequence[float], other: Sequence[float]) -> float:
        if len(one) != len(other):
            return float("inf")
        pairs = zip(one, other, self._bounds, strict=True)
        return sum(((a - b) / (high - low)) ** 2 for a, b, (low, high) in pairs if high > low)

    def _write(self, arrays: Arrays, number: int, step: int) -> None:
        import numpy as np

        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # NumPy would pickle Python's strings; its own have a fixed length.
        plain = {n: a.astype(str) if a.dtype.kind == "O" else a for n, a in arrays.items()}
        with _private(self._folder / f"{number}-{step}.npz") as file:
            np.savez(file, **plain)


@contextlib.contextmanager
def _private(path: Path) -> Iterator[Any]:
    """A file that only this user may read; it appears at ``path`` when it is complete."""
    part = path.with_name(f"{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        yield file
    part.replace(path)


def _features(arrays: Arrays) -> list[float]:
    """Numbers that distinguish samples: the magnitude and the variation of each input's values."""
    import numpy as np

    found: list[float] = []
    for _, array in sorted(arrays.items()):
        if array.dtype.kind in "OSU":
            texts = [str(each) for each in array.ravel()]
            found += [len(set(texts)), float(np.mean([len(each) for each in texts] or [0]))]
            continue
        if array.dtype.kind == "V":
            array = array.view(f"u{array.dtype.itemsize}")  # noqa: PLW2901
        values = np.nan_to_num(array.astype(np.float64).ravel(), posinf=1e39, neginf=-1e39)
        if not values.size:
            found += [0.0] * 5
            continue
        largest = float(np.abs(values).max()) or 1.0
        scaled = values / largest
        found += [
            float(scaled.mean()),
            float(np.log10(scaled.std() * largest + 1e-9)),
            float(np.log10(largest + 1e-9)),
            float((values == 0).mean()),
            float(np.unique(values).size) if array.dtype.kind in "iu" else 0.0,
        ]
    return found


class _Session:
    """A session's state: the outputs of the last run, and the sequence that it belongs to."""

    def __init__(self, kept: _Kept) -> None:
        self.kept = kept
        self.outputs: Arrays = {}
        self.sequence = _Sequence(None)

    def continues(self, arrays: Arrays) -> bool:
        """Whether ``arrays`` contain an output of the run before: then this is the next step."""
        import numpy as np

        found = {
            name: output
            for name, array in arrays.items()
            for output, before in self.outputs.items()
            if array.shape == before.shape and array.dtype == before.dtype
            # Constant values, such as zeros at the start, show nothing.
            if array.size and (array != array.flat[0]).any() and np.array_equal(array, before)
        }
        self.kept.states.update(found)
        return bool(found)


class Recorder:
    """Records a process of the app below ``folder``, as ``settings`` require."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = settings["models"]
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._process = self._folder / str(os.getpid())
        self._process.mkdir(mode=0o700, exist_ok=True)
        self._kept: dict[str, _Kept] = {}
        self._report: dict[str, Any] = {
            "onnxruntime": False,
            "others": [],
            "unseen": {},
            "error": None,
        }
        self.write()

    def after_fork(self) -> None:
        """Start afresh in a forked process: the samples so far belong to the other one."""
        self._lock = threading.RLock()
        with self._safely():
            self._reset()

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Exception as error:
            self._report["error"] = f"{type(error).__name__}: {error}"

    def write(self) -> None:
        """Write the report of this process."""
        with self._safely():
            models = {
                name: {"runs": e.runs, "other_sizes": e.other_sizes, "states": e.states}
                for name, e in self._kept.items()
            }
            with _private(self._process / REPORT) as file:
                file.write(json.dumps({**self._report, "models": models}).encode())

    def wrap(self, module: Any) -> None:
        """Record the sessions of ``module``, which has ONNX Runtime's `InferenceSession`."""
        class_ = module.InferenceSession
        original_init, original_run = class_.__init__, class_.run
        recorder = self

        @functools.wraps(original_init)
        def init(
            session: Any,
            path_or_bytes: Any,
            sess_options: Any = None,
            providers: Any = None,
            provider_options: Any = None,
            **more: Any,
        ) -> None:
            name = None
            with recorder._safely():
                name, compiled = recorder._model(path_or_bytes)
            if name is not None:
                if compiled:
                    raise RuntimeError(
                        "epcontext record runs models on the CPU, and this one is compiled for another EP"
                    )
                providers, provider_options = [_CPU], None
            original_init(session, path_or_bytes, sess_options, providers, provider_options, **more)
            with recorder._safely():
                recorder._opened(session, name, path_or_bytes)

        @functools.wraps(original_run)
        def run(session: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            outputs = original_run(session, output_names, input_feed, run_options)
            known = getattr(session, "_epcontext_recorded", None)
            if known is not None:
                with recorder._safely():
                    recorder._ran(session, known, output_names, input_feed, outputs)
            return outputs

        class_.__init__, class_.run = init, run
        for name in _UNSEEN:
            if hasattr(class_, name):
                setattr(class_, name, self._counted(name, getattr(class_, name)))
        self._report["onnxruntime"] = True
        self.write()

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(session: Any, *given: Any, **more: Any) -> Any:
            if getattr(session, "_epcontext_recorded", None) is not None:
                with self._safely():
                    unseen = self._report["unseen"]
                    unseen[name] = unseen.get(name, 0) + 1
            return original(session, *given, **more)

        return method

    def _model(self, given: Any) -> tuple[str | None, bool]:
        """The name of the project's model in ``given``, and whether it was compiled for another EP."""
        is_bytes = isinstance(given, bytes)
        path = None if is_bytes else Path(os.fsdecode(given)).absolute()
        size = len(given) if path is None else path.stat().st_size
        if any(each["size"] == size for each in self._settings):
            content = given if path is None else path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            for each in self._settings:
                if each["sha256"] == digest:
                    return each["name"], False
        return (None, False) if path is None else self._packed(path)

    def _packed(self, path: Path) -> tuple[str | None, bool]:
        """The same for a file of the project's own model package."""
        names = {each["name"] for each in self._settings}
        for folder in list(path.parents)[:4]:
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                content = json.loads((folder / "manifest.json").read_bytes())
                for component in content["components"].values():
                    name = component["additional_metadata"]["hatch-epcontext"]["model"]
                    for variant in component["variants"].values():
                        file = variant["executor_info"]["ort"]["model_file"]
                        place = folder / variant["variant_directory"] / file
                        if name in names and place.resolve() == path.resolve():
                            return name, variant["ep"] != _CPU
        return None, False

    def _opened(self, session: Any, name: str | None, given: Any) -> None:
        if name is None:
            other = "a model in memory" if isinstance(given, bytes) else os.fsdecode(given)
            if other not in self._report["others"]:
                self._report["others"].append(other)
        else:
            settings = next(each for each in self._settings if each["name"] == name)
            kept = self._kept.setdefault(name, _Kept(settings))
            session._epcontext_recorded = _Session(kept)  # noqa: SLF001, so that it lives as long
        self.write()

    def _ran(
        self, session: Any, known: _Session, names: Any, feed: Mapping[str, Any], outputs: Any
    ) -> None:
        import numpy as np

        kept = known.kept
        kept.runs += 1
        arrays = {}
        for each in session.get_inputs():
            if each.name in feed:
                array = _array(feed[each.name], each.type)
                size = kept.settings["shapes"].get(each.name, each.shape)
                dims = [kept.settings["dims"].get(str(d), d) for d in size]
                # ONNX Runtime has no dimensions for an unknown rank, and takes no others for a number.
                fits = not dims or (
                    len(dims) == array.ndim
                    and all(
                        not isinstance(d, int) or d == s
                        for d, s in zip(dims, array.shape, strict=True)
                    )
                )
                arrays[each.name] = array if fits else None
        if any(array is None for array in arrays.values()):
            kept.other_sizes += 1
            known.outputs = {}
            return
        if known.continues(arrays) and known.sequence.steps < _STEPS:
            kept.add(arrays, known.sequence)
        else:
            known.sequence = kept.begin(arrays, self._process)
        if known.sequence.number is not None and known.sequence.steps <= 2:
            # Now, because an app that is killed does not reach its end.
            self.write()
        names = names or [each.name for each in session.get_outputs()]
        # Copies, because the app may change its outputs.
        known.outputs = {
            name: np.array(value)
            for name, value in zip(names, outputs, strict=False)
            if isinstance(value, np.ndarray) and value.nbytes <= _MAX_STATE
        }


def _array(value: Any, type_: str) -> Any:
    """An input as an array: ONNX Runtime also accepts lists, and its own values."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "numpy"):
        bits = _bits_without_numpy(type_)
        return value.numpy() if bits is None else _raw(value, bits)
    name = type_.removeprefix("tensor(").removesuffix(")")
    return np.asarray(
        value, {"float": "float32", "double": "float64", "string": "O"}.get(name, name)
    )


def _bits_without_numpy(type_: str) -> int | None:
    """The bits of a value of the tensor ``type_`` if NumPy lacks it; None if it does not."""
    found = re.fullmatch(r"tensor\((?:(bfloat16)|float([48])\w+|u?int([24]))\)", type_)
    return found and int(next(filter(None, found.groups())).removeprefix("bfloat"))


def _raw(value: Any, bits: int) -> Any:
    """The values of a tensor on the CPU as bytes, which ml_dtypes reads: small ones get one each."""
    import numpy as np

    if value.device_name() != "cpu":
        raise TypeError(f"an input is on {value.device_name()}")
    shape, count = value.shape(), math.prod(value.shape())
    # The first of the values in a byte is in its lowest bits.
    data = np.frombuffer(ctypes.string_at(value.data_ptr(), (count * bits + 7) // 8), np.uint8)
    if bits < 8:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        data = (data[:, None] >> shifts & 2**bits - 1).ravel()[:count]
    return data.view(f"V{max(1, bits // 8)}").reshape(shape)


class _ImportHook:
    """Passes ONNX Runtime's module to the recorder when the app imports it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _COLLECTION:
            return None
        others = [each for each in sys.meta_path if each is not self]
        found = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._recorder.wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start(folder: Path) -> None:
    recorder = Recorder(folder, json.loads((folder / SETTINGS).read_bytes()))
    sys.meta_path.insert(0, _ImportHook(recorder))
    atexit.register(recorder.write)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder.after_fork)


def _import_other() -> None:
    """Import the environment's own ``sitecustomize``, which this module hides."""
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    _here = Path(__file__).parent
    sys.path[:] = [each for each in sys.path if Path(each) != _here]
    with contextlib.suppress(Exception):
        _start(_here)
    _import_other()

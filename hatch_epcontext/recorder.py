"""Keeps inputs of the project's models in an app: `epcontext record` puts a copy of this module on its path.

Python imports the copy as ``sitecustomize`` when it starts, in the app's environment, where this package need
not be installed. Beside it are `SETTINGS` and `RUNS`. Samples are ``<process>-<sample>-<frame>.npz``. An
error of this module is printed, and does not reach the app.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTINGS = "settings.json"

RUNS = "runs.jsonl"
"""A line for each run: the model; by input its shape in the model, and that of a sample; by input the output
that the app feeds to it; and the names of the samples, of those that are kept and of others."""

SAMPLES = _FRAMES = 8
"""The most samples of a model in one process; those of a recurrent one have up to as many frames."""


class Recorder:
    """Records this process. ``folder`` has a folder for each of ``models``.

    They have by name the ``sha256``, the compiled ``dims`` and ``shapes``, and whether to ``show`` these.
    """

    def __init__(self, folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._models = folder, models
        self._lock = threading.RLock()
        self._random = random.Random(0)  # noqa: S311, the choice of samples is no secret
        self._begun: defaultdict[str, int] = defaultdict(int)
        self._kept: defaultdict[str, list[int]] = defaultdict(list)

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Exception as error:
            sys.stderr.write(f"epcontext record: {type(error).__name__}: {error}\n")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wrap ONNX Runtime's module when the app imports it: this object is a finder of modules."""
        if name != "onnxruntime.capi.onnxruntime_inference_collection":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.wrap(module.InferenceSession)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def wrap(self, class_: Any) -> None:
        """Record what sessions of ``class_`` run, and run the project's models on the CPU."""
        original_init, original_run = class_.__init__, class_.run
        get_inputs, get_outputs = class_.get_inputs, class_.get_outputs

        @functools.wraps(original_init)
        def init(session: Any, path_or_bytes: Any, *arguments: Any, **options: Any) -> None:
            model = None
            with self._safely():
                if model := self._name(path_or_bytes):
                    # What is compiled for another EP fails here, and the loader opens the next.
                    arguments, options["provider_options"] = arguments[:1], None
                    options["providers"] = ["CPUExecutionProvider"]
            original_init(session, path_or_bytes, *arguments, **options)
            with self._safely():
                if model:
                    inputs, outputs = get_inputs(session), get_outputs(session)
                    shapes = compiled_shapes((*inputs, *outputs), self._models[model])
                    own = {value.name: value.shape for value in inputs}
                    session._epcontext_last = SimpleNamespace(  # noqa: SLF001
                        model=model, own=own, shapes=shapes, outputs={}, samples=[], frame=_FRAMES
                    )

        @functools.wraps(original_run)
        def run(session: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            outputs = original_run(session, output_names, input_feed, run_options)
            if (last := getattr(session, "_epcontext_last", None)) is not None:
                with self._safely():
                    self._ran(session, last, input_feed, output_names, outputs)
            return outputs

        def show(original: Any) -> Any:
            @functools.wraps(original)
            def get_values(session: Any) -> Any:
                values, last = original(session), getattr(session, "_epcontext_last", None)
                if last is None or not self._models[last.model]["show"]:
                    return values
                facts = ((v.name, v.type, last.shapes[v.name]) for v in values)
                return [SimpleNamespace(name=n, type=t, shape=[*s]) for n, t, s in facts]

            return get_values

        class_.__init__, class_.run = init, run
        class_.get_inputs, class_.get_outputs = show(get_inputs), show(get_outputs)

    def _name(self, model: Any) -> str | None:
        """The name of the project's model with the bytes, or at the path, ``model``."""
        path = None if isinstance(model, bytes) else Path(os.fsdecode(model)).absolute()
        digest = hashlib.sha256(model if path is None else path.read_bytes()).hexdigest()
        for name, known in self._models.items():
            if known["sha256"] == digest:
                return name
        # Or a variant of it, in the project's model package.
        with contextlib.suppress(Exception):
            manifest = json.loads((path.parents[2] / "manifest.json").read_bytes())  # type: ignore[union-attr]
            component = manifest["components"][path.parents[1].name]  # type: ignore[union-attr]
            name = component["additional_metadata"]["hatch-epcontext"]["model"]
            return name if name in self._models else None
        return None

    def _ran(self, session: Any, last: Any, feed: Any, names: Any, outputs: Any) -> None:
        import numpy as np

        arrays = {
            value.name: _array(feed[value.name], value.type)
            for value in session.get_inputs()
            if value.name in feed
        }
        states = {
            name: output
            for name, array in arrays.items()
            for output, before in last.outputs.items()
            if array.shape == before.shape and array.dtype == before.dtype
            # Constant values, such as zeros at the start, show nothing.
            if array.size and (array != array.flat[0]).any() and np.array_equal(array, before)
        }
        named = zip(names or [o.name for o in session.get_outputs()], outputs, strict=False)
        # Copies, because the app may change its outputs.
        last.outputs = {name: o.copy() for name, o in named if isinstance(o, np.ndarray)}
        batches = _batches(arrays, last.shapes)
        if states and last.frame < _FRAMES:
            last.frame += 1
        else:
            last.samples, last.frame = [self._begin(last.model) for _ in batches], 1
        shapes = {name: [last.own[name], array.shape] for name, array in batches[0].items()}
        names = [f"{os.getpid()}-{sample}" for sample in last.samples]
        with (self._folder / RUNS).open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps([last.model, shapes, states, names])}\n")
        for sample, batch in zip(last.samples, batches, strict=True):
            if sample in self._kept[last.model]:
                part = self._folder / last.model / f"{os.getpid()}-{sample}-{last.frame}.part"
                with part.open("wb") as file:
                    np.savez(file, **batch)
                part.replace(part.with_suffix(".npz"))

    def _begin(self, model: str) -> int:
        """The number of a new sample; kept are the first, and a random choice of the others."""
        number, kept = self._begun[model], self._kept[model]
        self._begun[model] += 1
        if len(kept) < SAMPLES:
            kept.append(number)
        elif (index := self._random.randint(1, number)) < SAMPLES:
            for file in (self._folder / model).glob(f"{os.getpid()}-{kept[index]}-*.npz"):
                file.unlink()
            kept[index] = number
        return number


def compiled_shapes(values: Any, model: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The shapes of a session's inputs and outputs as they are compiled."""
    dims, shapes = dict(model["dims"]), model["shapes"]
    for value in values:
        # A named dimension has one size in the whole model.
        dims.update(zip(value.shape, shapes.get(value.name, ()), strict=False))
    dims.pop(None, None)
    return {
        v.name: shapes.get(v.name) or [dims.get(size, size) for size in v.shape] for v in values
    }


def _batches(arrays: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``arrays`` in batches of the compiled ``shapes``, without what is left; or as they are, if in none."""
    axes = {
        name: [
            (axis, size)
            for axis, (size, own) in enumerate(zip(shapes[name], array.shape, strict=False))
            if isinstance(size, int) and size != own
        ]
        for name, array in arrays.items()
    }
    split = {name: pairs[0] for name, pairs in axes.items() if len(pairs) == 1}
    counts = {arrays[name].shape[axis] // size for name, (axis, size) in split.items()}
    # A state may have its batch elsewhere, but another first axis that differs is a length.
    is_batch = any(axis == 0 for axis, _ in split.values()) and max(map(len, axes.values())) == 1
    if not is_batch or len(counts) != 1 or counts == {0}:
        return [arrays]
    return [
        {
            **arrays,
            **{
                name: arrays[name].take(range(index * size, (index + 1) * size), axis)
                for name, (axis, size) in split.items()
            },
        }
        for index in range(*counts)
    ]


def _array(value: Any, type_: str) -> Any:
    """An input as an array: ONNX Runtime also accepts lists, and its own values."""
    import numpy as np

    name = type_.removeprefix("tensor(").removesuffix(")")
    # NumPy would pickle Python's strings; its own have a fixed length.
    dtype = {"float": "float32", "string": "U"}.get(name, name)
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value, dtype)


if __name__ == "sitecustomize":
    _folder = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if Path(path) != _folder]
    with contextlib.suppress(Exception):
        sys.meta_path.insert(0, Recorder(_folder, json.loads((_folder / SETTINGS).read_bytes())))
    # The environment's own, which this one hid; without any, Python ignores the error.
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")

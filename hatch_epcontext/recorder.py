"""Keeps inputs of the project's models in an app: `epcontext record` puts a copy of this module on its path.

Python imports the copy as ``sitecustomize`` when it starts, in the app's environment, where this package need
not be installed. Beside it is `SETTINGS`. Each process gets a folder there, named by its id, with its
`REPORT`, and ``<model>/<sample>/<step>.npz``. No error of this module reaches the app.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTINGS = "settings.json"
REPORT = "report.json"

SAMPLES = 8
"""The most samples of a model; of a recurrent one each has up to `_STEPS` consecutive steps."""

_STEPS = 8
_MAX_BYTES = 2**30  # for one step of all samples, unless one has more

_COLLECTION = "onnxruntime.capi.onnxruntime_inference_collection"
"""The module of `onnxruntime.InferenceSession`."""


class Recorder:
    """Records this process below ``folder``; ``models``: the settings of each model, by its name."""

    def __init__(self, folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
        self._folder, self._models = folder, models
        self.start()

    def start(self) -> None:
        """Start the record of this process; a forked one has nothing of its parent's."""
        self._lock = threading.RLock()
        self._random = random.Random(0)  # noqa: S311, the choice of samples is no secret
        self._process = self._folder / str(os.getpid())
        self._kept: defaultdict[str, list[Path]] = defaultdict(list)
        models: Any = defaultdict(lambda: {"runs": 0, "other_sizes": 0, "samples": 0, "states": {}})
        self._report: dict[str, Any] = {"imported": False, "error": "", "models": models}
        with self._safely():
            self._process.mkdir(exist_ok=True)
        self.write()

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except Exception as error:
            self._report["error"] = f"{type(error).__name__}: {error}"

    def write(self) -> None:
        """Write the report."""
        with self._safely():
            part = self._process / "part"
            part.write_text(json.dumps(self._report), encoding="utf-8")
            part.replace(self._process / REPORT)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wrap ONNX Runtime's module when the app imports it: this object is a finder of modules."""
        if name != _COLLECTION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                with self._safely():
                    self._wrap(module.InferenceSession)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap(self, class_: Any) -> None:
        original_init, original_run = class_.__init__, class_.run

        @functools.wraps(original_init)
        def init(
            session: Any,
            path_or_bytes: Any,
            sess_options: Any = None,
            providers: Any = None,
            provider_options: Any = None,
            **more: Any,
        ) -> None:
            with self._safely():
                if name := self._name(path_or_bytes):
                    # What is compiled for another EP fails here, and the loader opens the next.
                    providers, provider_options = ["CPUExecutionProvider"], None
                    # Its last run: the outputs, and which step it was of the sample in a folder. It lives as
                    # long as the session.
                    last = SimpleNamespace(model=name, outputs={}, folder=Path(), step=_STEPS)
                    session._epcontext_last = last  # noqa: SLF001
            original_init(session, path_or_bytes, sess_options, providers, provider_options, **more)
            with self._safely():
                if hasattr(session, "_epcontext_last"):
                    self._report["models"][session._epcontext_last.model]  # noqa: SLF001, it was opened
            self.write()

        @functools.wraps(original_run)
        def run(session: Any, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            outputs = original_run(session, output_names, input_feed, run_options)
            if (last := getattr(session, "_epcontext_last", None)) is not None:
                with self._safely():
                    self._ran(session, last, input_feed, output_names, outputs)
            return outputs

        class_.__init__, class_.run = init, run
        self._report["imported"] = True
        self.write()

    def _name(self, model: Any) -> str | None:
        """The name of the project's model with the bytes, or at the path, ``model``."""
        path = None if isinstance(model, bytes) else Path(os.fsdecode(model)).absolute()
        size = len(model) if path is None else path.stat().st_size
        if like := {s["sha256"]: n for n, s in self._models.items() if s["size"] == size}:
            content = model if path is None else path.read_bytes()
            if name := like.get(hashlib.sha256(content).hexdigest()):
                return name
        if path is None:
            return None
        # Or a variant of it, in the project's model package.
        for folder in path.parents[:4]:
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                manifest = json.loads((folder / "manifest.json").read_bytes())
                for component in manifest["components"].values():
                    name = component["additional_metadata"]["hatch-epcontext"]["model"]
                    folders = [v["variant_directory"] for v in component["variants"].values()]
                    if name in self._models and any(
                        path.is_relative_to(folder / f) for f in folders
                    ):
                        return str(name)
        return None

    def _ran(self, session: Any, last: Any, feed: Any, names: Any, outputs: Any) -> None:
        import numpy as np

        report = self._report["models"][last.model]
        report["runs"] += 1
        inputs = [value for value in session.get_inputs() if value.name in feed]
        arrays = {value.name: _array(feed[value.name], value.type) for value in inputs}
        states = {
            name: output
            for name, array in arrays.items()
            for output, before in last.outputs.items()
            if array.shape == before.shape and array.dtype == before.dtype
            # Constant values, such as zeros at the start, show nothing.
            if array.size and (array != array.flat[0]).any() and np.array_equal(array, before)
        }
        names = names or [value.name for value in session.get_outputs()]
        # Copies, because the app may change its outputs.
        last.outputs = {
            name: output.copy()
            for name, output in zip(names, outputs, strict=False)
            if isinstance(output, np.ndarray)
        }
        settings = self._models[last.model]
        if not all(_fits(arrays[value.name], value, settings) for value in inputs):
            report["other_sizes"] += 1
            last.step = _STEPS
            return
        report["states"].update(states)
        if states and last.step < _STEPS:
            last.step += 1
        else:
            size = sum(array.nbytes for array in arrays.values())
            last.folder, last.step = self._sample(last.model, size), 1
        if last.folder.is_dir():
            with (last.folder / "part").open("wb") as file:
                # NumPy would pickle Python's strings; its own have a fixed length.
                strings = {n: a.astype(str) for n, a in arrays.items() if a.dtype.kind == "O"}
                np.savez(file, **(arrays | strings))
            (last.folder / "part").replace(last.folder / f"{last.step}.npz")
            # An app that is killed does not reach its end.
            self.write()

    def _sample(self, model: str, size: int) -> Path:
        """The folder of a new sample with ``size`` bytes a step; it exists if the sample is kept.

        That are the first, and a random choice of all others.
        """
        number, kept = self._report["models"][model]["samples"], self._kept[model]
        self._report["models"][model]["samples"] += 1
        folder = self._process / model / str(number)
        if len(kept) < max(1, min(SAMPLES, _MAX_BYTES // max(1, size))):
            kept.append(folder)
        elif (place := self._random.randint(1, number)) < len(kept):
            shutil.rmtree(kept[place])
            kept[place] = folder
        else:
            return folder
        folder.mkdir(parents=True)
        return folder


def _fits(array: Any, value: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the input ``value`` has the sizes that the configuration fixes."""
    sizes = [
        settings["dims"].get(str(s), s) for s in settings["shapes"].get(value.name, value.shape)
    ]
    # ONNX Runtime has no dimensions for an unknown rank.
    return not sizes or (
        len(sizes) == array.ndim
        and all(s == size for s, size in zip(sizes, array.shape, strict=True) if isinstance(s, int))
    )


def _array(value: Any, type_: str) -> Any:
    """An input as an array: ONNX Runtime also accepts lists, and its own values."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "numpy"):
        return value.numpy()
    name = type_.removeprefix("tensor(").removesuffix(")")
    return np.asarray(value, {"float": "float32", "string": "O"}.get(name, name))


if __name__ == "sitecustomize":
    _folder = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if Path(path) != _folder]
    with contextlib.suppress(Exception):
        _recorder = Recorder(_folder, json.loads((_folder / SETTINGS).read_bytes()))
        sys.meta_path.insert(0, _recorder)
        atexit.register(_recorder.write)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_recorder.start)
    # The environment's own, which this one hid; without any, Python ignores the error.
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")

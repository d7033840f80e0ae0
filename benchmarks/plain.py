"""The same work by hand: one script compiles, opens, runs and compares one model after the other.

    python -m benchmarks.plain REQUEST.json

Prints as JSON what each step cost, for each model. `Request.write` writes such a file.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from benchmarks.measure import Cost, Done, run
from benchmarks.project import Source

PACKAGES = {"qnn": "onnxruntime_qnn", "openvino": "onnxruntime_ep_openvino"}
OPTIONS = {
    "qnn": {"backend_type": "htp", "soc_model": "60", "htp_arch": "73"},
    "openvino": {},
}

ATOL = {"cpu": 1e-3, "qnn": 5e-2, "openvino": 1e-1}

MORE = "more runs"
"""The step with the runs beyond the first."""

STEPS = ("fix, simplify", "compile", "open", "run", "run on CPU", "compare", MORE)
"""The steps of a model, in order."""

CONTROL_FLOW = ("If", "Loop", "Scan")
"""What the EPs do not compile, and the script simplifies away where it can; other models it leaves alone."""

_SEED = 20240229
"""That of the build, so that both compare the same samples."""

_REPOSITORY = Path(__file__).resolve().parents[1]

MakeOptions = Callable[[], Any]
"""Makes session options with the EP's device."""


@dataclass(frozen=True)
class Request:
    """What the script works on; the contexts are written into ``folder``.

    ``runs``: how often each model is run and compared, by its name; once by default.
    """

    provider: str
    folder: Path
    sources: Sequence[Source]
    runs: Mapping[str, int] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the request as JSON."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Request:
        """Read a request that `write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        sources = [Source(**{**each, "path": Path(each["path"])}) for each in found["sources"]]
        return Request(found["provider"], Path(found["folder"]), sources, found["runs"])


def by_hand(
    provider: str, sources: Sequence[Source], folder: Path, runs: Mapping[str, int] | None = None
) -> Done:
    """Run the script in a process of its own; the contexts are written into the new ``folder``."""
    folder.mkdir(parents=True)
    path = folder.with_suffix(".json")
    Request(provider, folder, sources, runs or {}).write(path)
    return run([sys.executable, "-m", "benchmarks.plain", str(path)], _REPOSITORY)


def available(provider: str) -> bool:
    """Whether the EP of ``provider`` is installed and has a device on this machine."""
    code = f"from benchmarks.plain import start; start({provider!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, check=False)
    return done.returncode == 0


def steps(done: Done) -> dict[str, dict[str, Cost]]:
    """The costs of each step, by the model's name, as the script printed them."""
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        name: {step: Cost(*cost) for step, cost in each.items()} for name, each in found.items()
    }


class Clock:
    """Measures steps that follow one another, in wall time and in the CPU time of all threads."""

    def __init__(self) -> None:
        self.costs: dict[str, tuple[float, float]] = {}
        self._last = self._now()

    def step(self, name: str) -> None:
        """Count the time since the last step, or since the start, as this step's."""
        now = self._now()
        self.costs[name] = (now[0] - self._last[0], now[1] - self._last[1])
        self._last = now

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def main() -> None:
    started = time.process_time()
    request = Request.read(Path(sys.argv[1]))
    clock = Clock()
    make_options = start(request.provider)
    clock.step("register")
    # The imports were this process's first work.
    costs: dict[str, Mapping[str, tuple[float, float]]] = {
        "": {"import": (started, started), **clock.costs}
    }
    for source in request.sources:
        costs[source.name] = _one(source, request, make_options)
    print(json.dumps(costs))


def start(provider: str) -> MakeOptions:
    """Register the EP of ``provider``; raises when it is not installed, or has no device here."""
    if provider == "cpu":
        make: MakeOptions = ort.SessionOptions
        return make
    package: Any = importlib.import_module(PACKAGES[provider])
    name = package.get_ep_name()
    ort.register_execution_provider_library(name, package.get_library_path())
    device = next(device for device in ort.get_ep_devices() if device.ep_name == name)

    def options() -> ort.SessionOptions:
        result = ort.SessionOptions()
        result.add_provider_for_devices([device], OPTIONS[provider])
        return result

    return options


def _one(
    source: Source, request: Request, make_options: MakeOptions
) -> Mapping[str, tuple[float, float]]:
    clock = Clock()
    fixed = onnx.load(source.path)
    constants = _fix(fixed, source)
    rng = np.random.default_rng(_SEED)
    feeds = _feeds(fixed, source, rng)
    if any(node.op_type in CONTROL_FLOW for node in fixed.graph.node):
        # Imported only here: it takes longer than many a model, and few need it.
        import onnxslim

        fixed = onnxslim.slim(fixed)
    prepared = fixed.SerializeToString()
    clock.step("fix, simplify")
    result = request.folder / f"{source.name}_ctx.onnx"
    _compile(prepared, result, request.provider, make_options)
    clock.step("compile")
    session = ort.InferenceSession(result, make_options())
    clock.step("open")
    outputs = session.run(None, feeds)
    clock.step("run")
    reference = ort.InferenceSession(source.path, providers=["CPUExecutionProvider"])
    references = reference.run(None, {**feeds, **constants})
    clock.step("run on CPU")
    _compare(outputs, references, source, request)
    clock.step("compare")
    for _ in range(1, request.runs.get(source.name, 1)):
        feeds = _feeds(fixed, source, rng)
        outputs = session.run(None, feeds)
        _compare(outputs, reference.run(None, {**feeds, **constants}), source, request)
    clock.step(MORE)
    return clock.costs


def _compare(outputs: Any, references: Any, source: Source, request: Request) -> None:
    for output, expected in zip(outputs, references, strict=True):
        atol = ATOL[request.provider] * max(1.0, float(np.abs(expected).max()))
        assert np.allclose(output, expected, rtol=1e-2, atol=atol), source.name


def _fix(model: onnx.ModelProto, source: Source) -> dict[str, np.ndarray[Any, Any]]:
    constants = {name: np.array(value, np.int64) for name, value in source.constants.items()}
    for value in list(model.graph.input):
        if value.name in constants:
            model.graph.initializer.append(
                numpy_helper.from_array(constants[value.name], value.name)
            )
            model.graph.input.remove(value)
            continue
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, source.shapes[value.name], strict=True):
            dim.dim_value = size
    return constants


def _feeds(
    model: onnx.ModelProto, source: Source, rng: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for value in model.graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = source.shapes[value.name]
        if dtype.kind == "f":
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            feeds[value.name] = rng.integers(0, source.bounds[value.name], shape).astype(dtype)
    return feeds


def _compile(prepared: bytes, result: Path, provider: str, make_options: MakeOptions) -> None:
    options = make_options()
    if provider == "cpu":
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(result)
        ort.InferenceSession(prepared, options, providers=["CPUExecutionProvider"])
        return
    compiler = ort.ModelCompiler(
        options,
        prepared,
        graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
    )
    compiler.compile_to_file(str(result))


if __name__ == "__main__":
    main()

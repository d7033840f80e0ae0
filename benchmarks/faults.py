"""Puts faults into open models, one at a time, and counts those that validation finds on the CPU.

    pip install -e . --group bench
    python -m benchmarks.faults --models models --results faults.json
    python -m benchmarks.faults --models models --results new.json --before faults.json

The faults are the same in each run: weights reversed, a bias left out, an inner value cut off at a quarter
of its largest, an output transposed, a number doubled. The faulty model runs on the CPU, and its outputs are
judged with the limits of each of `JUDGES`. ``--before`` prints what only one of two runs found.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.models import ZOO, OpenModel, fetch
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import Key
from hatch_epcontext.graph import graph
from hatch_epcontext.graph.dtypes import Arrays
from hatch_epcontext.graph.scope import Scope
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.worker.advice import Subject, explain, problems_of
from hatch_epcontext.worker.comparison.compare import compare_runs
from hatch_epcontext.worker.comparison.runs import Reference
from hatch_epcontext.worker.ort_values import run
from hatch_epcontext.worker.reference import reference
from hatch_epcontext.worker.session import cpu_options, open_session
from hatch_epcontext.worker.source import fix_inputs, read_source

JUDGES = ("cpu", "qnn")
"""The providers whose limits judge."""

_MAX_BYTES = 25 * 10**6
"""Larger models take too long."""

_KINDS = {"reversed": 4, "bias": 3, "cut off": 4, "transposed": 2, "doubled": 3}
"""Each kind of fault, and how many of it a model gets at most."""

_ADDING = frozenset(
    {"Add", "BatchNormalization", "Conv", "ConvTranspose", "Gemm", "LayerNormalization"}
)
"""Operators that add a bias, behind their first operand."""


@dataclass(frozen=True)
class Fault:
    """A fault of ``kind`` at the value ``place``; ``put`` makes the faulty graph of a copy of the model."""

    kind: str
    place: str
    put: Callable[[onnx.GraphProto], None]


def faults(model: onnx.ModelProto, feeds: Arrays, rng: np.random.Generator) -> Iterator[Fault]:
    """Some faults of ``model`` of each kind; ``feeds`` are inputs, for the values inside it."""
    main = model.graph
    weights = [each for each in main.initializer if each.data_type == onnx.TensorProto.FLOAT]
    many = [each.name for each in weights if len(each.dims) > 1 and np.prod(each.dims) >= 16]
    added = {name for node in main.node if node.op_type in _ADDING for name in node.input[1:]}
    biases = [
        each.name
        for each in weights
        if each.name in added and len(each.dims) == 1 and numpy_helper.to_array(each).any()
    ]
    for name in _some("reversed", many, rng):
        yield Fault("reversed", name, _changed(name, lambda array: array.ravel()[::-1]))
    for name in _some("bias", biases, rng):
        yield Fault("bias", name, _changed(name, np.zeros_like))
    largest = {
        name: float(np.abs(array[np.isfinite(array)]).max(initial=0))
        for name, array in _inner(model, feeds).items()
    }
    for name in _some("cut off", [name for name, each in largest.items() if each > 0], rng):
        yield Fault("cut off", name, _cut_off(name, largest[name] / 4))
    shapes = {
        name: array.shape
        for name, array in _outputs(model, feeds).items()
        if array.dtype == np.float32
    }
    tables = [name for name, shape in shapes.items() if sum(size > 1 for size in shape) > 1]
    for name in _some("transposed", tables, rng):
        yield Fault("transposed", name, _transposed(name, shapes[name]))
    for name in _some("doubled", many, rng):
        yield Fault("doubled", name, _changed(name, _largest_doubled))


def _some(kind: str, names: Sequence[str], rng: np.random.Generator) -> list[str]:
    chosen = rng.permutation(len(names))[: _KINDS[kind]]
    return [names[index] for index in sorted(chosen)]


def _outputs(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    return run(open_session(model.SerializeToString(), cpu_options()), feeds)


def _inner(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """The floats inside ``model`` that depend on ``feeds``."""
    scope, flow = Scope.of(model), Scope(model.graph)
    outputs = {value.name for value in model.graph.output}
    names = [
        name
        for node in model.graph.node
        for name in node.output
        if name and name not in outputs and flow.varies([name]) and scope.dtype(name) == np.float32
    ]
    probed = _copy(model)
    float_ = onnx.TensorProto.FLOAT
    probed.graph.output.extend(helper.make_tensor_value_info(each, float_, None) for each in names)
    found = _outputs(probed, feeds)
    return {name: found[name] for name in names}


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _store_constants(main: onnx.GraphProto) -> None:
    """Make the Constant nodes of ``main``, as some exporters write weights, initializers."""
    for node in list(main.node):
        if (tensor := graph.constant_tensor(node)) is not None:
            stored = main.initializer.add()
            stored.CopyFrom(tensor)
            stored.name = node.output[0]
            main.node.remove(node)


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[onnx.GraphProto], None]:
    def put(main: onnx.GraphProto) -> None:
        (tensor,) = (each for each in main.initializer if each.name == name)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(array).reshape(array.shape).copy(), name))

    return put


def _largest_doubled(array: Any) -> Any:
    doubled = array.copy()
    doubled.flat[np.abs(array).argmax()] *= 2
    return doubled


def _behind(main: onnx.GraphProto, name: str, nodes: Sequence[onnx.NodeProto]) -> None:
    """Put ``nodes``, from ``faulty_in`` to ``name``, behind what makes the value ``name``."""
    (index,) = (i for i, node in enumerate(main.node) if name in node.output)
    maker = main.node[index]
    maker.output[list(maker.output).index(name)] = "faulty_in"
    kept = [*main.node[: index + 1], *nodes, *main.node[index + 1 :]]
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in kept]
    del main.node[:]
    main.node.extend(copies)


def _cut_off(name: str, limit: float) -> Callable[[onnx.GraphProto], None]:
    def put(main: onnx.GraphProto) -> None:
        for bound, value in (("faulty_low", -limit), ("faulty_high", limit)):
            main.initializer.append(numpy_helper.from_array(np.array([value], np.float32), bound))
        # Opsets before 8 and 12 know neither Max with shapes of all kinds nor Clip with inputs.
        nodes = [
            helper.make_node("Max", ["faulty_in", "faulty_low"], ["faulty_max"]),
            helper.make_node("Min", ["faulty_max", "faulty_high"], [name]),
        ]
        _behind(main, name, nodes)

    return put


def _transposed(name: str, shape: tuple[int, ...]) -> Callable[[onnx.GraphProto], None]:
    axes = [axis for axis, size in enumerate(shape) if size > 1][-2:]
    order = list(range(len(shape)))
    order[axes[0]], order[axes[1]] = axes[1], axes[0]

    def put(main: onnx.GraphProto) -> None:
        main.initializer.append(numpy_helper.from_array(np.array(shape), "faulty_shape"))
        nodes = [
            helper.make_node("Transpose", ["faulty_in"], ["faulty_out"], perm=order),
            helper.make_node("Reshape", ["faulty_out", "faulty_shape"], [name]),
        ]
        _behind(main, name, nodes)

    return put


def judged(faulty: onnx.ModelProto, expected: Reference, model: Model) -> dict[str, str]:
    """What each of `JUDGES` says of ``faulty``: the first message, empty where it agrees."""
    session = open_session(faulty.SerializeToString(), cpu_options())
    runs = [run for run in expected.runs if run.on_target and run.usual]
    verdicts = {}
    for name in JUDGES:
        tolerance, subject = PROVIDERS[name].tolerance, Subject(model, "the model")
        verdicts[name] = ""
        if difference := compare_runs(session, expected, tolerance, runs).difference:
            explained = explain(difference, tolerance, subject, expected.facts)
            verdicts[name] = problems_of(explained)[0].message
    return verdicts


def tried(open_model: OpenModel, path: Path) -> dict[str, dict[str, str]]:
    """What `judged` says of each fault of a model, by the model, the kind and the place."""
    model = Model(
        open_model.name,
        path,
        Key(("models", 0)),
        dims=open_model.dims,
        shapes={name: tuple(shape) for name, shape in open_model.shapes.items()},
        constants=open_model.constants,
    )
    fixed = read_source(path, model.key)
    fix_inputs(fixed, model)
    _store_constants(fixed.graph)
    expected = reference(model, fixed)
    if said := {name: text for name, text in judged(fixed, expected, model).items() if text}:
        raise SystemExit(f"{model.name} differs without a fault: {said}")
    rng = np.random.default_rng(zlib.crc32(model.name.encode()))
    results = {}
    for fault in faults(fixed, expected.feeds, rng):
        faulty = _copy(fixed)
        fault.put(faulty.graph)
        results[f"{model.name}: {fault.kind} {fault.place}"] = judged(faulty, expected, model)
    return results


def _is_tried(model: OpenModel, path: Path) -> bool:
    main = onnx.load(path, load_external_data=False).graph
    # Integers are noisy, which is another question; and ONNX Runtime crashes on some constant conditions.
    other = bool(model.keys) or bool(graph.control_flow(main))
    few = sum(each.data_type == onnx.TensorProto.FLOAT for each in graph.tensors(main)) < 2
    return not (other or few or path.stat().st_size > _MAX_BYTES)


def changes(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """A line for each fault that one of two runs found, and the other did not."""
    for fault in before.keys() & after.keys():
        for judge in JUDGES:
            was, now = before[fault][judge], after[fault][judge]
            if bool(was) != bool(now):
                yield f"{judge}: {'found' if now else 'LOST'}: {fault}\n    {now or was}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=Path, required=True, help="a folder that keeps the downloaded packages"
    )
    parser.add_argument("--results", type=Path, required=True, help="the JSON file of results")
    parser.add_argument("--before", type=Path, help="the results of an earlier run")
    parser.add_argument("--model", action="append", help="only this model; repeatable")
    arguments = parser.parse_args()
    chosen = [each for each in ZOO if not arguments.model or each.name in arguments.model]
    results: dict[str, dict[str, str]] = {}
    for model, source in zip(chosen, fetch(arguments.models, chosen), strict=True):
        if _is_tried(model, source.path):
            results |= tried(model, source.path)
            arguments.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    found = Counter(judge for each in results.values() for judge in JUDGES if each[judge])
    for judge in JUDGES:
        print(f"{judge}: {found[judge]} of {len(results)} faults found")
    if arguments.before:
        before = json.loads(arguments.before.read_text(encoding="utf-8"))
        print(*sorted(changes(before, results)), sep="\n")


if __name__ == "__main__":
    main()

"""Builds ONNX's own node tests for an EP, and counts by operator what compiles whole and computes right.

    python -m benchmarks.operators --provider qnn            # by builds, as users start them
    python -m benchmarks.operators --provider qnn --plain    # by the plain EP, without rewrites
    python -m benchmarks.operators --operator Resize --operator Pad

The tests are in the package onnx. Those of plain tensors become models, in which what an exporter stores is
stored. ``--write`` writes ``benchmarks/operators-<provider>.json``, which the table in
``docs/what-compiles.md`` is made of.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.plain import OPTIONS, PACKAGES, start
from benchmarks.project import TARGETS, toml

FOLDER = Path(__file__).resolve().parent

_STORED = """
axes axis shape pads k K sizes scales roi starts ends steps split repeats depth new_shape size
image_shape block_shape trip_count cond dft_length frame_length frame_step output_shape target_shape
values sequence_lens seq_lens max_output_boxes_per_class iou_threshold score_threshold start limit
delta diagonal ratio training_mode t r value constant_value shape_like dims scale x_scale y_scale
a_scale b_scale w_scale x_zero_point y_zero_point a_zero_point b_zero_point w_zero_point zero_point
W R B P w b bias weight weights gamma beta mean var num_mel_bins sample_rate lower_edge_hertz
upper_edge_hertz M axis_input tensor_k window filter
"""

STORED = frozenset(_STORED.split())
"""The names of inputs that exporters store in the model."""

PLAIN = frozenset((*range(1, 8), *range(9, 14)))
"""The element types of plain tensors."""

AT_ONCE = 128
"""The most models in one build."""

NEAR = 0.1
"""The largest relative error of a plain EP that counts as right."""

_MOST_REASONS = 2
"""The most reasons of an operator that the table keeps."""

_COMPUTED = "None of them depends on an input"
"""What a build says of a model whose outputs ONNX Runtime computes beforehand."""


@dataclass(frozen=True)
class Result:
    """The result of one test.

    ``end``: ``"right"``, ``"folds"`` if its outputs are constants, ``"partial"`` if nodes stay on the CPU,
    ``"wrong"`` or ``"refused"``; ``rewrites``: those that changed it; ``why``: what the EP or the build says.
    """

    operator: str
    end: str
    rewrites: Sequence[str] = ()
    why: str = ""


@dataclass
class Row:
    """The results of all tests of an operator: how each ended, through which rewrites, and why."""

    tests: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    rewrites: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def stored(self, plain: int) -> dict[str, Any]:
        """The row as JSON; ``plain``: how many tests the plain EP compiles whole and right."""
        reasons = [reason for reason, _ in self.reasons.most_common(_MOST_REASONS)]
        counts = {"ends": dict(self.ends), "rewrites": dict(self.rewrites)}
        return {"tests": self.tests, "plain": plain, **counts, "reasons": reasons}


def write_tests(folder: Path, operators: Sequence[str]) -> dict[str, str]:
    """Write the model and inputs of each test into ``folder``; returns their operators by name."""
    from onnx.backend.test.case.node import collect_testcases

    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    with mock.patch("onnx.reference.ops.op_pool_common.pool", _empty_pool):
        cases = collect_testcases(None)
    for case in cases:
        model, data = case.model, case.data_sets
        if model is None or not data:
            continue
        operator = _operator(model)
        if operators and operator not in operators:
            continue
        if any(opset.domain.startswith("ai.onnx.") for opset in model.opset_import):
            continue
        if (inputs := _inputs(model, data[0][0])) is None:
            continue
        stored = [name for name in inputs if name in STORED]
        for name in stored[1:] if len(stored) == len(inputs) else stored:
            model.graph.initializer.append(numpy_helper.from_array(inputs.pop(name), name))
        fed = [value for value in model.graph.input if value.name in inputs]
        del model.graph.input[:]
        model.graph.input.extend(fed)
        name = case.name.removeprefix("test_")
        onnx.save(model, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", allow_pickle=False, **inputs)
        names[name] = operator
    return dict(sorted(names.items()))


def _empty_pool(
    padded: np.ndarray[Any, Any],
    shape: Sequence[int],
    kernel: object,
    strides: object,
    sizes: Sequence[int],
    *_: object,
    **__: object,
) -> np.ndarray[Any, Any]:
    """A result of ONNX, of which only the shape is read: computing those of pools takes four seconds."""
    return np.zeros([*shape[:2], *sizes], padded.dtype)


def _operator(model: onnx.ModelProto) -> str:
    nodes = model.graph.node
    return nodes[0].op_type if len(nodes) == 1 else "several"


def _inputs(model: onnx.ModelProto, data: Iterable[Any]) -> dict[str, np.ndarray[Any, Any]] | None:
    """The values of all inputs; None if there are none, or one is no plain tensor with values."""
    types = [value.type for value in (*model.graph.input, *model.graph.output)]
    if any(type_.tensor_type.elem_type not in PLAIN for type_ in types):
        return None
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    arrays = [*data]
    if not all(isinstance(array, np.ndarray) or np.isscalar(array) for array in arrays):
        return None
    values = dict(zip(names, map(np.asarray, arrays), strict=False))
    return values if values and all(array.size for array in values.values()) else None


def build(folder: Path, names: Mapping[str, str], provider: str) -> dict[str, Result]:
    """The results of builds of the tests in ``folder``."""
    results: dict[str, Result] = {}
    everything = [*names]
    for begin in range(0, len(everything), AT_ONCE):
        left = everything[begin : begin + AT_ONCE]
        while left:
            # Models that are refused before anything compiles end a build: the rest is built without them.
            report = _build(folder, left, provider)
            results |= _read(report, names)
            done = [name for name in left if name in results]
            left = [name for name in left if name not in results] if not report["jobs"] else []
            if not done:
                raise SystemExit(f"the build of {left[0]} and others says nothing of them")
        print(f"{len(results)} of {len(names)}", file=sys.stderr)
    return results


def _build(folder: Path, names: Iterable[str], provider: str) -> Any:
    """The report of one build."""
    models = [
        {"name": name, "path": f"{name}.onnx", "validate": {"inputs": f"{name}.npz"}}
        for name in names
    ]
    table = {"fallback": "none", "targets": {"npu": TARGETS[provider]}, "models": models}
    lines = ["[project]", 'name = "app"', 'version = "1"', "[tool.epcontext]"]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in names:
            for path in (folder / f"{name}.onnx", folder / f"{name}.npz"):
                os.link(path, root / path.name)
        text = "\n".join([*lines, *(f"{toml(key)} = {toml(table[key])}" for key in table)])
        (root / "pyproject.toml").write_text(f"{text}\n", encoding="utf-8")
        report = root / "report.json"
        limits = {"CACHE_DIR": str(root / "cache"), "REPORT": str(report), "TIMEOUT": "120"}
        env = {**os.environ, **{f"HATCH_EPCONTEXT_{key}": value for key, value in limits.items()}}
        command = [str(Path(sys.executable).with_name("epcontext")), "build", temporary]
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, check=False
        )
        if report.exists():
            return json.loads(report.read_text(encoding="utf-8"))
        early = re.findall(
            r"\((\w+), [^)]*\)[^\n]*?: (EPC\d+)\n\s+([^\n]*)", done.stdout + done.stderr
        )
        if not early:
            raise SystemExit(done.stdout + done.stderr)
        failures = [
            {"models": [name], "problems": [{"kind": kind, "message": message}]}
            for name, kind, message in early
        ]
        return {"jobs": [], "failures": failures}


def _read(report: Any, names: Mapping[str, str]) -> dict[str, Result]:
    results = {}
    for job in report["jobs"]:
        (model,) = job["models"]
        name = model["model"]
        rewrites = model["preparation"]["rewrites"]
        results[name] = Result(names[name], "right", [*dict.fromkeys(rewrites)])
    for failure in report["failures"]:
        problem = failure["problems"][0]
        message = " ".join(problem["message"].split())
        end = {"EPC302": "partial", "EPC401": "wrong"}.get(problem["kind"], "refused")
        for name in failure["models"]:
            folds = _COMPUTED in message
            results[name] = Result(
                names[name],
                "folds" if folds else end,
                why="" if folds else f"{problem['kind']} {message}",
            )
    return results


def plain(folder: Path, names: Mapping[str, str], provider: str) -> dict[str, Result]:
    """What the EP compiles whole without a build, each test in a process of its own."""
    context: Any = multiprocessing.get_context(None if sys.platform == "win32" else "fork")
    results = {}
    for name, operator in names.items():
        answer: Any = context.Queue()
        process = context.Process(
            target=_try_plain, args=(folder / f"{name}.onnx", provider, answer)
        )
        process.start()
        try:
            end, why = answer.get(timeout=20)
        except queue.Empty:
            end, why = "refused", "it crashes, or takes more than 20 s"
        process.join(1)
        process.kill()
        results[name] = Result(operator, end, why=why)
    return results


def _try_plain(path: Path, provider: str, answer: Any) -> None:
    with Path(os.devnull).open("wb") as null:
        for stream in (1, 2):
            os.dup2(null.fileno(), stream)
    try:
        answer.put(_compare_plain(path, provider))
    except Exception as error:
        answer.put(("refused", str(error)[:200]))


def _compare_plain(path: Path, provider: str) -> tuple[str, str]:
    import onnxruntime as ort

    options = start(provider)
    compiler = ort.ModelCompiler(
        options(),
        str(path),
        embed_compiled_data_into_model=True,
        flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
    )
    compiled = compiler.compile_to_bytes()
    if any(node.op_type != "EPContext" for node in onnx.load_from_string(compiled).graph.node):
        return "partial", ""
    inputs = dict(np.load(path.with_suffix(".npz")))
    expected = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    results = ort.InferenceSession(compiled, options()).run(None, inputs)
    worst = max(map(_error, expected, results))
    return ("right" if worst < NEAR else "wrong"), f"the relative error is {worst:.2g}"


def _error(expected: np.ndarray[Any, Any], result: np.ndarray[Any, Any]) -> float:
    if expected.dtype.kind != "f":
        return float(np.mean(expected != result))
    finite = np.isfinite(expected)
    right, given = expected[finite].astype(float), result[finite].astype(float)
    error = np.linalg.norm(right - given) / (np.linalg.norm(right) + 1e-12)
    return float(np.nan_to_num(error, nan=9.0, posinf=9.0))


def rows(results: Mapping[str, Result]) -> dict[str, Row]:
    """The results by operator."""
    table: defaultdict[str, Row] = defaultdict(Row)
    for result in results.values():
        row = table[result.operator]
        row.tests += 1
        row.ends[result.end] += 1
        row.rewrites.update(result.rewrites)
        if result.why:
            row.reasons[_shorten(result.why)] += 1
    return dict(sorted(table.items(), key=lambda item: (item[0] == "several", item[0])))


_KINDS = {
    "EPC209": "ONNX Runtime's CPU cannot run it",
    "EPC307": "the EP's compiler fails",
    "EPC308": "the EP crashes",
    "EPC401": "results differ, mostly because of float16",
}
"""What the errors of builds mean."""


def _shorten(why: str) -> str:
    """The EP's own reason, without the names of nodes and values."""
    kind, _, message = why.partition(" ")
    if kind in _KINDS:
        return _KINDS[kind]
    reasons = re.findall(r"\(((?:[^()]|\([^()]*\))*)\)", message)
    words = [reason for reason in reasons if re.search("[a-z]{3}", reason)]
    if not words:
        return "the EP refuses it and says no reason" if kind == "EPC301" else "a node stays"
    text = re.sub(r"; (it reads|the input|\w+ does not apply).*", "", words[-1])
    return re.sub(r"'[^']*'", "'...'", text)[:120]


def show(table: Mapping[str, Row]) -> Iterator[str]:
    """The lines of a table."""
    ends = ("right", "folds", "partial", "wrong", "refused")
    yield f"{'operator':28} tests" + "".join(f"{end:>9}" for end in ends) + "  rewrites; reasons"
    total = Row(sum(row.tests for row in table.values()))
    for row in table.values():
        total.ends += row.ends
    for name, row in {"all": total, **table}.items():
        counts = "".join(f"{row.ends[end]:9}" for end in ends)
        texts = [*row.rewrites, *(f"{reason} x{n}" for reason, n in row.reasons.most_common(2))]
        yield f"{name:28} {row.tests:5}{counts}  {'; '.join(texts)}"


def _iterate(arguments: argparse.Namespace) -> dict[str, Result]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = write_tests(folder, arguments.operator or ())
        if arguments.test:
            names = {n: o for n, o in names.items() if any(map(n.__contains__, arguments.test))}
        if arguments.keep:
            shutil.copytree(folder, arguments.keep, dirs_exist_ok=True)
        return (plain if arguments.plain else build)(folder, names, arguments.provider)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--provider", default="qnn", choices=sorted(PACKAGES.keys() & OPTIONS))
    parser.add_argument("--plain", action="store_true", help="the plain EP, without a build")
    parser.add_argument("--operator", action="append", help="only its tests; repeatable")
    parser.add_argument("--test", action="append", help="only tests with this in their names")
    parser.add_argument("--keep", type=Path, help="a folder for the models")
    parser.add_argument("--each", action="store_true", help="also print the result of each test")
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    if arguments.write and (arguments.operator or arguments.test):
        parser.error("--write needs all tests")
    results = _iterate(arguments)
    for name, result in results.items() if arguments.each else ():
        print(f"{name}: {result.end} {', '.join(result.rewrites)} {result.why}")
    table = rows(results)
    print(*show(table), sep="\n")
    if arguments.write:
        path = FOLDER / f"operators-{arguments.provider}.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name, row in table.items():
            before = stored.get(name, {})
            if arguments.plain:
                stored[name] = {"ends": {}, "rewrites": {}, "reasons": []} | before
                stored[name] |= {"tests": row.tests, "plain": row.ends["right"]}
            else:
                stored[name] = row.stored(before.get("plain", 0))
        path.write_text(f"{json.dumps(stored, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

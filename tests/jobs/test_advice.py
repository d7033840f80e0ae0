"""The settings that messages print: each is accepted, and changes what follows."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.config.load import load
from hatch_epcontext.errors import ConfigError, EpcontextError, Kind, Problem, Setting
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.run import build
from tests.conftest import needs_qnn
from tests.graph.rewrites.unrolled import recurrent
from tests.models import half_for_the_cpu, network, parsed, save, with_refused

pytestmark = needs_qnn

LOOP = """(float[1, 8] x) => (float[1, 8] y) <int64 trips = {3}, bool true = {1}> {
    sum = Add (x, x)
    y = Loop (trips, true, sum) <body = body (int64 i, bool go, float[1, 8] state)
        => (bool go, float[1, 8] next) { rate = Sigmoid (state) next = Mul (rate, x) }> }"""
BRANCHES = """(float[1, 8] x, int64 rate) => (float[1, 8] y) <int64 high = {16000}> {
    is_high = Equal (rate, high)
    s = Sigmoid (x)
    y = If (is_high) <then_branch = fast () => (float[1, 8] t) { t = Tanh (s) },
                      else_branch = slow () => (float[1, 8] e) { i = IsInf (s) e = Where (i, x, s) }> }"""
LABELLED = """(float[1, 8] x) => (string[1, 8] y) {
    a = MatMul (x, w) b = Sigmoid (a)
    y = ai.onnx.ml.LabelEncoder <keys_floats = [0.0, 1.0], values_strings = ["a", "b"]> (b) }"""
OUTPUTS = """(float[4, 8] x) => (float[4, 8] a, float[4, 8] b, float[4, 8] c) {
    a = MatMul (x, w) b = MatMul (a, w) c = MatMul (b, w) }"""
OFF = {"validate": {"tolerance": False}}

CASES: Mapping[str, tuple[onnx.ModelProto, dict[str, Any], dict[str, Any], str]] = {
    "layer": (recurrent("LSTM", length=9, activations=["HardSigmoid", "Tanh", "Tanh"]),
              {"unroll-limit": 20}, {}, "unroll-limit"),
    "loop": (parsed(LOOP), {"unroll-limit": 0}, {}, "unroll-limit"),
    "between": (with_refused(), {}, {}, "min-coverage"),
    "data": (half_for_the_cpu(), {}, {}, "cut"),
    "labels": (parsed(LABELLED, w=(8, 8)), {}, {}, "cut"),
    "branches": (parsed(BRANCHES), {}, {}, "constants"),
    "open": (network(), {}, {}, "dims"),
    "limits": (parsed("(float[4, 8] x) => (float[4, 8] y) { y = MatMul (x, w) }", w=(8, 8)), {},
               {"validate": {"tolerance": {"snr": 80, "atol": 1e-9}}}, "tolerance"),
    "relative": (parsed("(float[4, 8] x) => (float[4, 8] y) { y = MatMul (x, w) }", w=(8, 8)), {},
                 {"validate": {"tolerance": {"snr": 80, "rtol": 1e-6}}}, "tolerance"),
    "outputs": (parsed(OUTPUTS, w=(8, 8)), {}, {"validate": {"tolerance": {"cosine": 0.9, "outputs": {
        "a": {"snr": 80}, "b": {"snr": 0, "cosine": 1.0}, "c": {"snr": 5}}}}}, "tolerance"),
}  # fmt: skip
"""A model that fails, what its target and its own table have, and the setting that helps most."""


def with_setting(table: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """``table`` with the value of ``setting`` at its key."""
    result: Any = copy.deepcopy(dict(table))
    inside, (*outer, last) = result, setting.key.parts
    for part in outer:
        inside = inside.setdefault(part, {}) if isinstance(part, str) else inside[part]
    inside[last] = setting.value
    return dict(result)


class Project:
    """A project with one model, whose builds share a cache."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def outcome(self, table: Mapping[str, Any]) -> Sequence[Problem]:
        """The problems of a build with the configuration ``table``."""
        staging = Path(tempfile.mkdtemp(prefix="staging-", dir=self.root.parent))
        lines: list[str] = []
        try:
            planned = plan(load(self.root, table, {}, {}))
            build(planned, staging, Cache(self.root.parent / "cache", lines.append), lines.append)
        except ConfigError:
            # No message may lead to one.
            raise
        except EpcontextError as error:
            return error.problems
        return ()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_setting_that_a_message_prints_changes_what_follows(project: Path, name: str) -> None:
    model, target, own, best = CASES[name]
    save(model, project / "models" / "a.onnx")
    inputs = {
        value.name: np.zeros(
            [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim], np.float32
        )
        for value in model.graph.input
    }
    np.savez(project / "samples.npz", **inputs)  # type: ignore[arg-type]
    qnn = {"provider": "qnn", "provider-options": {"soc_model": 60}, **target}
    table = {"targets": {"qnn": qnn}, "models": [{"path": "models/a.onnx", **own}]}
    builds = Project(project)
    problems = builds.outcome(table)
    assert problems
    settings = [setting for problem in problems for setting in problem.settings]
    first, *_ = (setting for setting in settings if setting.value is not None)
    assert best in first.key.parts, str(problems)
    assert not any(setting.value is None for setting in settings)
    assert not (problems[0].hint or "").endswith(":")
    if best == "tolerance":
        before_limits = own["validate"]["tolerance"]
        assert before_limits.keys() <= first.value.keys()
        assert before_limits.get("outputs", {}).keys() <= first.value["outputs"].keys()
    before = [(problem.kind, problem.message) for problem in problems]
    for setting in settings:
        # The last remedy is the same in all cases.
        if name != "between" and ("cpu" in setting.key.parts or setting.value == ["cpu"]):
            continue
        changed = with_setting(table, setting)
        if setting.value == ["cpu"]:
            changed["targets"]["cpu"] = {"provider": "cpu"}
        after = builds.outcome(changed)
        if "cpu" not in setting.key.parts:
            assert [(problem.kind, problem.message) for problem in after] != before, str(setting)
        if setting is first:
            assert not after, str(after)


def test_a_model_that_no_simplifier_takes_gets_no_advice_about_chips(project: Path) -> None:
    model = parsed("(float[1, 4] x) => (float[1, 4] y) { y = Relu (x) }", 5, check=False)
    model.opset_import[0].version = 2
    save(model, project / "models" / "a.onnx")
    qnn = {"provider": "qnn", "provider-options": {"soc_model": 60}}
    for own in ({}, OFF):
        table = {"targets": {"qnn": qnn}, "models": [{"path": "models/a.onnx", **own}]}
        (problem,) = Project(project).outcome(table)
        assert problem.kind in (Kind.SOURCE_FAILED, Kind.NOTHING_COMPILED)
        assert "convert it with onnx.version_converter (not tried)" in problem.advice()
        assert (problem.settings, problem.causes) == ((), ())

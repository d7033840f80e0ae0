from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.cli._flag_errors import told_in_flags
from hatch_epcontext.errors import BuildError, ConfigError, EpcontextError, Problem

MODELS = {"a": Path("models/a.onnx"), "b": Path("b.onnx")}


def told(problem: Problem, kind: type[EpcontextError] = ConfigError) -> EpcontextError:
    with pytest.raises(kind) as raised, told_in_flags(MODELS, "it did not work"):
        raise kind(problem)
    return raised.value


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("tool.epcontext.provider", "--provider"),
        ("tool.epcontext", "--provider"),
        ("tool.epcontext: target qnn", "--provider"),
        ("tool.epcontext.provider-options.soc_model", "--option soc_model"),
        ('tool.epcontext.session-options."a.b"', '--config "a.b"'),
        ("tool.epcontext.min-coverage", "--set min-coverage"),
        ("tool.epcontext.device-filter.type", "--set device-filter.type"),
        ("tool.epcontext.models[1].dims.n", "b.onnx: --dim n"),
        ("tool.epcontext.models[0].shapes.x[2]", "models/a.onnx: --shape x[2]"),
        ("tool.epcontext.models[0].tolerance.atol", "models/a.onnx: --set tolerance.atol"),
        ("tool.epcontext.models[0]", "models/a.onnx"),
        ("a -> qnn: validation", "a -> qnn: validation"),
        ("HATCH_EPCONTEXT_JOBS", "HATCH_EPCONTEXT_JOBS"),
    ],
)
def test_where_it_is_wrong(key: str, flag: str) -> None:
    assert told(Problem(key, "is wrong.")).problems == (Problem(flag, "is wrong."),)


@pytest.mark.parametrize(
    ("fix", "flags"),
    [
        (
            "Fix it in the model's table, such as: dims = { batch = 1, n = 1 }",
            "Fix it: --dim batch=1 --dim n=1",
        ),
        (
            "Fix it in the model's table, such as: shapes = { x = [1, 3] }",
            "Fix it: --shape x=1,3",
        ),
        ("say so in tool.epcontext.models[1].tolerance.", "say so in b.onnx: --set tolerance"),
        ("Install what it takes.", "Install what it takes."),
    ],
)
def test_what_to_do(fix: str, flags: str) -> None:
    assert told(Problem("x", "y", fix)).problems[0].hint == flags


def test_a_failure_says_what_it_means_here() -> None:
    assert str(told(Problem("x", "y"), BuildError)).startswith("it did not work:")
    assert str(told(Problem("x", "y"))).startswith("the configuration is not right:")

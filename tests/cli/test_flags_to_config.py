from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from hatch_epcontext.cli._flags import Flags
from hatch_epcontext.cli._flags_to_config import SETTABLE, configuration, names_of, value
from hatch_epcontext.config.settings import Model


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{ atol = 0.1 }", {"atol": 0.1}),
        ('"1"', "1"),
        ("burst", "burst"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_a_value_is_toml_or_itself(text: str, read: object) -> None:
    assert value(text) == read


def test_models_are_called_what_their_files_are_called() -> None:
    paths = [Path("a.onnx"), Path("x/my model.v2.onnx"), Path("_.onnx")]
    assert list(names_of(paths)) == ["a", "my_model.v2", "model"]
    assert list(names_of([Path("a.onnx")], Path("out/b_ctx.onnx"))) == ["b"]
    with pytest.raises(click.UsageError, match="are both called a"):
        names_of([Path("a.onnx"), Path("x/a.onnx")])


def models(tmp_path: Path, **given: Any) -> tuple[Model, ...]:
    nothing: dict[str, Any] = {
        "options": {}, "configs": {}, "device": None, "dims": (), "shapes": (), "constants": (),
        "inputs": None, "optimization": None, "settings": {},
    }  # fmt: skip
    paths = {name: tmp_path / f"{name}.onnx" for name in ("a", "b")}
    for path in paths.values():
        path.touch()
    return configuration(paths, Flags(provider="cpu", **{**nothing, **given})).models


def test_what_begins_with_a_models_name_is_that_models(tmp_path: Path) -> None:
    dims = (("n", "1"), ("a:m", "2"), ("b:m", "3"), ("c:m", "4"))
    a, b = models(tmp_path, dims=dims, shapes=(("b:x", "1, 3"),), constants=(("a:y", "[1.5]"),))
    assert a.dims == {"n": 1, "m": 2, "c:m": 4}
    assert b.dims == {"n": 1, "m": 3, "c:m": 4}
    assert (a.shapes, b.shapes) == ({}, {"x": (1, 3)})
    assert (a.constants, b.constants) == ({"y": [1.5]}, {})


def test_any_other_key_goes_to_its_table(tmp_path: Path) -> None:
    found = models(tmp_path, settings={"validate": "require", "min-coverage": "0.5"})
    assert [(m.validate, m.targets[0].min_coverage) for m in found] == [("require", 0.5)] * 2
    with pytest.raises(click.BadParameter, match='Did you mean "min-coverage"'):
        models(tmp_path, settings={"min-coverag": "1"})


def test_what_a_flag_says_and_what_is_a_wheels_cannot_be_set() -> None:
    assert {"tolerance", "validate", "timeout", "library", "ep-name", "profiles"} <= set(SETTABLE)
    assert not {"models", "provider", "path", "output", "wheel-tag", "editable"} & set(SETTABLE)

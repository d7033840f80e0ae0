"""The first node that differs is found, in whatever form of the model it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from hatch_epcontext.worker.comparison.diverging import first_difference
from hatch_epcontext.worker.comparison.runs import Facts, Reference, ReferenceRun
from tests.models import parsed

NODES = ("scaled", "moved", "y")


def save(path: Path, *, scale: float = 2.0, names: tuple[str, ...] = NODES) -> Path:
    """A model that multiplies, adds and limits, with these names of its values."""
    scaled, moved, limited = names
    made = parsed(
        f"""(float[1, 8] x) => (float[1, 8] y) <float bias = {{0.5}}> {{
            [multiply] {scaled} = Mul (x, scale)
            [add] {moved} = Add ({scaled}, bias)
            [limit] {limited} = Tanh ({moved}) }}""",
        scale=np.float32(scale),
    )
    onnx.save(made, path)
    return path


def difference(tmp_path: Path, other: Path) -> str:
    """What is found between a model and ``other``."""
    source = save(tmp_path / "source.onnx")
    feeds = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 8)}
    wanted = {"y": np.tanh(2 * feeds["x"] + 0.5)}
    run = ReferenceRun("random", (feeds,), (wanted,), "random", usual=True, on_target=True)
    reference = Reference((run,), Facts())
    return first_difference(source, other, reference, run)


def test_the_first_of_several_wrong_nodes_is_named(tmp_path: Path) -> None:
    found = difference(tmp_path, save(tmp_path / "other.onnx", scale=3))
    assert "Mul multiply has an error of 50 %" in found


def test_nodes_whose_values_have_other_names_are_passed_over(tmp_path: Path) -> None:
    names = ("folded", "moved", "y")
    found = difference(tmp_path, save(tmp_path / "other.onnx", scale=3, names=names))
    assert "Add add" in found


def test_equal_models_have_no_such_node(tmp_path: Path) -> None:
    assert not difference(tmp_path, save(tmp_path / "other.onnx"))


def test_a_model_that_cannot_be_opened_is_no_error(tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(b"no model")
    assert not difference(tmp_path, other)

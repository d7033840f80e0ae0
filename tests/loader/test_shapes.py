"""Which of several fixed shapes is opened."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from tests.loader.shipped import Shipper, Table, component, source_of, variant
from tests.models import of_any_rank, parsed, save

SHAPES: dict[str, list[int | str]] = {
    "det.64": [1, 3, 64, 64],
    "det.32": [1, 3, 32, 32],
    "det.wide": [1, 3, 32, 96],
}


def identity(shape: list[int | str]) -> onnx.ModelProto:
    sizes = ", ".join(map(str, shape))
    return parsed(f"(float[{sizes}] x) => (float[{sizes}] y) {{ y = Relu (x) }}")


@pytest.fixture
def several(ship: Shipper) -> Any:
    """An app with the model ``det`` in three shapes on ``fixed``, and open on ``open`` and the source."""
    fixed: dict[str, Table] = {}
    opened: list[int | str] = [1, 3, "height", "width"]
    save(identity(opened), ship.folder / "det/open/det.onnx")
    save(identity(opened), ship.folder / "det/source/det.onnx")
    for name, shape in SHAPES.items():
        inputs = [{"name": "x", "shape": shape, "dtype": "float32"}]
        save(identity(shape), ship.folder / name / "fixed/m.onnx")
        variants = {"fixed": variant(f"{name}/fixed", "m.onnx", inputs=inputs)}
        if not fixed:
            inputs = [{"name": "x", "shape": opened, "dtype": "float32"}]
            variants["open"] = variant("det/open", "det.onnx", inputs=inputs)
        variants["source"] = source_of("det/source", "det.onnx", opened)
        fixed[name] = component(variants, "det")
    return ship.write(fixed)


def x_of(height: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"x": (1, 3, height, width)}


def test_without_shapes_the_first_listed_is_opened(several: Any) -> None:
    assert several.models() == ["det"]
    assert several.shapes_of(several.load("det")) == {"x": (1, 3, 64, 64)}
    assert several.shapes_of(several.load("det", target="source")) == {
        "x": (1, 3, "height", "width")
    }


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1, 1, (32, 32)),
        (32, 32, (32, 32)),
        (32, 33, (32, 96)),
        (32, 96, (32, 96)),
        (33, 32, (64, 64)),
        (64, 64, (64, 64)),
        (0, 0, (32, 32)),
    ],
)
def test_the_smallest_shape_that_is_large_enough_is_opened(
    several: Any, height: int, width: int, expected: tuple[int, int]
) -> None:
    session = several.load("det", shapes=x_of(height, width))
    assert several.target_of(session) == "fixed"
    assert several.shapes_of(session) == {"x": (1, 3, *expected)}


LISTED = ("[1, 3, 64, 64]", "[1, 3, 32, 32]", "[1, 3, 32, 96]")


def test_where_no_shape_is_large_enough_a_target_with_open_shapes_is_opened(several: Any) -> None:
    session = several.load("det", shapes=x_of(64, 65))
    assert several.target_of(session) == "open"
    assert session.run(None, {"x": np.ones((1, 3, 64, 65), np.float32)})[0].shape[2:] == (64, 65)
    fixed, opened, source = several.explain("det", shapes=x_of(64, 65))
    assert fixed.outcome == "skipped"
    assert all(each in fixed.reason for each in LISTED)
    assert (opened.outcome, source.outcome) == ("opened", "not needed")


def test_an_unknown_rank_takes_every_shape(ship: Shipper) -> None:
    save(of_any_rank(), ship.folder / "a/cpu/a.onnx")
    inputs = [{"name": "x", "shape": None, "dtype": "float32"}]
    app = ship.write({"a": component({"cpu": variant("a/cpu", "a.onnx", inputs=inputs)})})
    for shape in ((), (2,), (1, 3, 4)):
        assert app.target_of(app.load("a", shapes={"x": shape})) == "cpu"


def test_where_nothing_is_large_enough_the_error_lists_the_shapes(several: Any) -> None:
    for arguments in ({"target": "fixed"}, {"target": "fixed", "fallback": False}):
        with pytest.raises(several.LoadError) as raised:
            several.load("det", shapes=x_of(65, 65), **arguments)
        assert all(each in str(raised.value) for each in LISTED)
    with pytest.raises(several.LoadError, match="none of its shapes is large enough"):
        # The number of channels is not open.
        several.load("det", shapes={"x": (1, 4, 1, 1)})


def test_sizes_of_numpy_are_sizes(several: Any) -> None:
    image: npt.NDArray[np.uint8] = np.zeros((1, 3, 20, 90), np.uint8)
    for shape in (image.shape, np.array(image.shape), [np.int32(size) for size in image.shape]):
        session = several.load("det", shapes={"x": shape})
        assert several.shapes_of(session) == {"x": (1, 3, 32, 96)}


def test_a_wrong_input_or_rank_is_an_error(several: Any) -> None:
    for shapes in ({"X": (1, 3, 1, 1)}, {"x": (3, 1, 1)}):
        with pytest.raises(several.LoadError, match=r"has the inputs \{'x': "):
            several.load("det", shapes=shapes)


def test_a_model_of_two_inputs_is_large_enough_in_both(ship: Shipper) -> None:
    components = {}
    for name, (first, second) in {"m.1": (8, 4), "m.2": (4, 8), "m.3": (4, 4)}.items():
        made = parsed(f"""(float[{first}] x, float[{second}] y) => (float[?] z)
        {{ z = Concat <axis = 0> (x, y) }}""")
        save(made, ship.folder / name / "m.onnx")
        inputs = [{"name": "x", "shape": [first]}, {"name": "y", "shape": [second]}]
        cpu = variant(name, "m.onnx", inputs=inputs)
        components[name] = component({"cpu": cpu}, "m")
    app = ship.write(components)
    for shapes, expected in (
        ({"x": (1,), "y": (1,)}, (4, 4)),
        ({"x": (5,)}, (8, 4)),
        ({"y": (5,), "x": (1,)}, (4, 8)),
        ({}, (8, 4)),
    ):
        found = app.shapes_of(app.load("m", shapes=shapes))
        assert found == {"x": (expected[0],), "y": (expected[1],)}
    with pytest.raises(app.LoadError, match="none of its shapes is large enough"):
        app.load("m", shapes={"x": (5,), "y": (5,)})

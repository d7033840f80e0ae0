"""Models with several shapes, and targets that fix shapes or leave them open."""

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.settings import Model, ShapeSet
from hatch_epcontext.errors import Kind
from tests.config.examples import assert_one_problem, one, problems, read, target

TARGETS = """
[targets.npu]
provider = "qnn"
[targets.cpu]
provider = "cpu"
[targets.intel]
provider = "openvino"
device = "npu"
"""

SIZES = "shapes = [{ x = [1, 3, 320, 320] }, { x = [1, 3, 640, 640] }]"


def several(keys: str = SIZES) -> str:
    return f'models = [{{ name = "det", path = "models/a.onnx", {keys} }}]\n{TARGETS}'


def targets_of(model: Model) -> list[str]:
    return [each.name for each in model.targets]


def test_each_shape_is_a_model_and_open_targets_have_one_of_the_configured_name(
    project: Path,
) -> None:
    small, large, plain = read(project, several()).models
    assert [each.name for each in (small, large, plain)] == [
        "det.1x3x320x320",
        "det.1x3x640x640",
        "det",
    ]
    assert targets_of(small) == targets_of(large) == ["npu", "intel"]
    assert targets_of(plain) == ["cpu"]
    assert (small.shapes, large.shapes) == ({"x": (1, 3, 320, 320)}, {"x": (1, 3, 640, 640)})
    assert plain.shapes == small.shapes
    shapes = small.key / "shapes"
    assert [model.size_key for model in (small, large, plain)] == [
        shapes / 0,
        shapes / 1,
        shapes / 0,
    ]
    shape_set = ShapeSet("det", ("det.1x3x320x320", "det.1x3x640x640"), ("npu", "cpu", "intel"))
    assert small.shape_set == shape_set
    assert small.shape_set is large.shape_set is plain.shape_set


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("dims = [{ seq = 128 }, { seq = 512 }]", ["det.seq128", "det.seq512"]),
        (
            "dims = [{ batch = 1, seq = 128 }, { seq = 512, batch = 2 }]",
            ["det.batch1_seq128", "det.batch2_seq512"],
        ),
        (
            "shapes = [{ ids = [1, 128], past = [1, 64] }, { past = [1, 8], ids = [1, 16] }]",
            ["det.1x128_1x64", "det.1x16_1x8"],
        ),
        ('dims = [{ "a b" = 1 }, { "a b" = 2 }]', ["det.a-b1", "det.a-b2"]),
    ],
)
def test_names_say_the_sizes_in_the_order_of_the_first_table(
    project: Path, keys: str, names: list[str]
) -> None:
    models = read(project, several(keys)).models
    assert [each.name for each in models] == [*names, "det"]


def test_a_table_beside_a_list_counts_for_all_shapes(project: Path) -> None:
    small, large, plain = read(project, several(SIZES + ", dims = { n = 4 }")).models
    assert small.dims == large.dims == plain.dims == {"n": 4}
    keys = "dims = [{ n = 1 }, { n = 2 }], shapes = { x = [1, 3] }"
    one, two, plain = read(project, several(keys)).models
    assert (one.dims, two.dims, plain.dims) == ({"n": 1}, {"n": 2}, {"n": 1})
    assert one.shapes == two.shapes == plain.shapes == {"x": (1, 3)}


@pytest.mark.parametrize(
    "keys", ["dims = [{ n = 4 }]", "dims = [{ n = 4 }], shapes = [{ x = [4] }]"]
)
def test_a_list_of_one_is_like_a_table(project: Path, keys: str) -> None:
    (model,) = read(project, several(keys)).models
    assert (model.name, model.dims, model.shape_set) == ("det", {"n": 4}, None)
    assert targets_of(model) == ["npu", "cpu", "intel"]


def test_a_model_whose_targets_are_all_open_stays_one(project: Path) -> None:
    keys = f'{SIZES}, targets = ["cpu"]'
    (model,) = read(project, several(keys)).models
    assert (model.name, model.shape_set) == ("det", None)
    assert model.shapes == {"x": (1, 3, 320, 320)}
    (model,) = read(project, several(SIZES), TARGETS="cpu").models
    assert (model.name, model.shape_set) == ("det", None)


def test_only_the_selected_targets_count(project: Path) -> None:
    small, large = read(project, several(), TARGETS="intel").models
    assert targets_of(small) == targets_of(large) == ["intel"]
    assert small.shape_set == ShapeSet("det", ("det.1x3x320x320", "det.1x3x640x640"), ("intel",))


def test_a_model_without_a_selected_target_stays_one(project: Path) -> None:
    keys = f'{SIZES}, targets = ["npu"]'
    (model,) = read(project, several(keys), TARGETS="cpu").models
    assert (model.name, model.targets, model.shape_set) == ("det", (), None)


def test_one_model_with_several_shapes_can_be_a_group(project: Path) -> None:
    toml = several(f'{SIZES}, share-weights = "both"')
    assert {each.share_weights for each in read(project, toml).models} == {"both"}
    assert len(read(project, toml, TARGETS="cpu").models) == 1, "the selection is no mistake"


@pytest.mark.parametrize(
    ("keys", "location", "message"),
    [
        ("dims = []", "models[0].dims", "must have at least one table"),
        ("dims = [{ n = 1 }, { n = 2 }], shapes = [{ x = [1] }, { x = [2] }]",
         "models[0].dims", "is a list, and shapes is one too"),
        ("dims = [{ n = 1 }, { n = 2 }, { n = 1 }]",
         "models[0].dims[2]", "is the same as tool.epcontext.models[0].dims[0]: { n = 1 }"),
        ("shapes = [{ x = [1] }, { x = [1], y = [2] }]",
         "models[0].shapes[1]", "is for x and y, and the first table for x"),
        ("dims = [{ n = 1 }, {}]", "models[0].dims[1]", "is for nothing, and the first table for n"),
        ("dims = [{ n = 1 }, { n = 0 }]", "models[0].dims[1].n", "must be at least 1"),
        ("shapes = [{ x = [1] }, { x = [-1] }]", "models[0].shapes[1].x[0]", "must be at least 0"),
        ("dims = [{ n = 1 }, 2]", "models[0].dims[1]", "must be a table"),
        ('shapes = [{ x = [1] }, { x = ["a"] }]', "models[0].shapes[1].x[0]", "must be a whole number"),
        ('dims = { n = "a" }', "models[0].dims.n", "must be a whole number"),
        ("dims = 1", "models[0].dims", "must be a table or a list"),
    ],
)  # fmt: skip
def test_invalid_shapes_are_reported_with_their_place(
    project: Path, keys: str, location: str, message: str
) -> None:
    found = problems(project, several(keys))
    assert location in found
    assert message in found[location].message


@pytest.mark.parametrize("name", ["det.1x3x320x320", "DET.1X3X640X640"])
def test_a_shape_cannot_have_the_name_of_another_model(project: Path, name: str) -> None:
    keys = f'{SIZES} }}, {{ name = "{name}", path = "models/b.onnx"'
    assert_one_problem(project, several(keys), "models[1]", "has the same name as")


def test_the_configured_name_stays_taken(project: Path) -> None:
    keys = f'{SIZES}, targets = ["npu"] }}, {{ name = "det", path = "models/b.onnx"'
    found = problems(project, several(keys))
    assert found["models[1]"].kind is Kind.DUPLICATE_NAME
    keys = f'{SIZES}, targets = ["npu"], share-weights = "det"'
    found = problems(project, several(keys))
    assert "also the name of a model" in found["models[0].share-weights"].message


def test_two_models_of_one_name_are_one_problem(project: Path) -> None:
    toml = several(f'{SIZES} }}, {{ name = "det", path = "models/b.onnx", {SIZES}')
    assert_one_problem(project, toml, "models[1]", "has the same name as tool.epcontext.models[0]")


def test_a_name_that_becomes_too_long_is_an_error(project: Path) -> None:
    def table(size: int) -> str:
        return "{ " + ", ".join(f"past_{n} = [1, 8, {size}, 64]" for n in range(40)) + " }"

    found = problems(project, several(f"shapes = [{table(128)}, {table(256)}]"))
    assert found.keys() == {"models[0].shapes[0]", "models[0].shapes[1]"}
    assert found["models[0].shapes[1]"].kind is Kind.INVALID_NAME


@pytest.mark.parametrize(
    ("provider", "keys", "static"),
    [
        ("qnn", "", True),
        ("vitisai", "", True),
        ("tensorrt", "", True),
        ("tensorrt-rtx", "", True),
        ("plugin", 'library = "some_ep"\nep-name = "X"', True),
        ("cpu", "", False),
        ("cuda", "", False),
        ("directml", "", False),
        ("webgpu", "", False),
        ("directml", 'device = "npu"', True),
        ("openvino", "", False),
        ("openvino", 'device = "npu"', True),
        ("openvino", 'device = "any"', True),
        ("openvino", "static-shapes = true", True),
        ("openvino", 'device = "npu"\nstatic-shapes = false', False),
    ],
)
def test_the_default_depends_on_provider_and_device(
    project: Path, provider: str, keys: str, static: bool
) -> None:
    assert target(project, one(provider, keys)).settings.static_shapes is static


def test_a_model_changes_static_shapes(project: Path) -> None:
    keys = ", ".join(f"targets.{name}.static-shapes = true" for name in ("npu", "cpu", "intel"))
    assert [t.settings.static_shapes for t in read(project, several(keys)).models[0].targets] == [
        True
    ] * 3
    keys = f"{SIZES}, {keys.replace('true', 'false')}"
    (model,) = read(project, several(keys)).models
    assert (model.name, targets_of(model)) == ("det", ["npu", "cpu", "intel"])


def test_a_variable_for_the_validation_counts_for_all_shapes(project: Path) -> None:
    models = read(project, several(), VALIDATE="structure").models
    assert [each.validate.mode for each in models] == ["structure"] * 3

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.coverage import check_coverage
from hatch_epcontext.errors import BuildError
from hatch_epcontext.protocol import Coverage, NodeFacts
from tests.results import configured


def failure(coverage: Coverage, project: Path, toml: str = "") -> str:
    target = configured(project, f'provider = "cpu"\nmodels = ["models/a.onnx"]\n{toml}').targets[0]
    with pytest.raises(BuildError) as raised:
        check_coverage(coverage, target, "a -> cpu")
    return str(raised.value)


def test_enough_is_enough(project: Path) -> None:
    (target,) = configured(
        project, 'provider = "cpu"\nmodels = ["models/a.onnx"]\nmin-coverage = 0.5'
    ).targets
    check_coverage(Coverage(4, 2, 1, (NodeFacts("a", "Op"),) * 2), target, "a -> cpu")
    check_coverage(None, target, "a -> cpu")


def test_operators_that_the_ep_lacks_are_named(project: Path) -> None:
    told = failure(Coverage(3, 2, 1, (NodeFacts("rnn", "GRU"),)), project)
    assert (
        "compiled 2 of 3 nodes (66.7%), and min-coverage is 100.0%. Left to the CPU: GRU rnn."
        in told
    )
    assert "lacks these operators" in told


def test_shapes_that_depend_on_the_data_are_named_as_the_reason(project: Path) -> None:
    left = (NodeFacts("", "NonZero", "the shape of its output 'y' depends on the data"),)
    told = failure(Coverage(2, 1, 1, left), project)
    assert "NonZero (the shape of its output 'y' depends on the data)" in told
    assert "cut the model before them" in told


def test_of_many_nodes_the_first_are_named(project: Path) -> None:
    left = tuple(NodeFacts(f"n{index}", "Op") for index in range(25))
    told = failure(Coverage(25, 0, 1, left), project)
    assert "Op n9 and 15 more." in told
    assert "n10" not in told

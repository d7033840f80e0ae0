from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hatch_epcontext.providers import Tolerance
from tests.config.examples import LONG, one, read, target


def test_a_partial_tolerance_leaves_the_rest_to_the_provider(project: Path) -> None:
    model = read(project, LONG).models[0]
    x_elite, cpu = model.targets
    assert model.tolerance_for(x_elite) == Tolerance(20, 0.99, rtol=0.1, unit=0.1)
    assert model.tolerance_for(cpu) == Tolerance(50, 0.9999, rtol=0.1)


def test_a_tolerance_of_zero_is_not_the_default(project: Path) -> None:
    model = read(project, LONG.replace("{ rtol = 0.1 }", "{ rtol = 0, cosine = 0 }")).models[0]
    _, cpu = model.targets
    assert model.tolerance_for(cpu) == Tolerance(50, 0.0, rtol=0.0, is_fixed=True)


def test_limits_of_outputs_win(project: Path) -> None:
    tolerance = "{ snr = 30, outputs = { y = { atol = 1 } } }"
    model = read(project, LONG.replace("{ rtol = 0.1 }", tolerance)).models[0]
    _, cpu = model.targets
    on_cpu = model.tolerance_for(cpu)
    assert on_cpu is not None
    own = Tolerance(30, 0.9999, is_fixed=True)
    assert (on_cpu.of("y"), on_cpu.of("z")) == (replace(own, atol=1), own)


@pytest.mark.parametrize(
    ("provider", "optimization", "needs_ep"),
    [
        ("qnn", "none", True),
        ("cuda", "none", False),
        ("cuda", "basic", False),
        ("cuda", "all", True),
    ],
)
def test_only_contexts_and_optimizations_of_the_ep_need_it(
    project: Path, provider: str, optimization: str, needs_ep: bool
) -> None:
    found = target(
        project,
        one(provider, f'optimization = "{optimization}"'),
    )
    assert found.needs_ep is needs_ep

from __future__ import annotations

import numpy as np
import onnx
import pytest

from hatch_epcontext.graph.rewrites.einsum import EINSUM
from tests.graph.rewrites.equal import operators, rewritten, untouched
from tests.models import parsed


def einsum(equation: str, *shapes: list[int]) -> onnx.ModelProto:
    result = np.einsum(equation.replace(" ", ""), *map(np.ones, shapes))
    names = [f"x{index}" for index in range(len(shapes))]
    inputs = ", ".join(f"float{shape} {name}" for shape, name in zip(shapes, names, strict=True))
    return parsed(
        f"""({inputs}) => (float{list(result.shape) or ""} y)
        {{ y = Einsum <equation = "{equation}"> ({", ".join(names)}) }}"""
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhid,bhjd->bhij", [[1, 2, 5, 8], [1, 2, 6, 8]]),
        ("bij,jk->bik", [[1, 2, 5], [5, 6]]),
        ("bhwc,hkc->bhwk", [[1, 2, 5, 8], [2, 3, 8]]),
        ("ij->ji", [[3, 4]]),
        ("ij->", [[3, 4]]),
        ("ijk->i", [[3, 4, 5]]),
        ("bi,bi->b", [[3, 4], [3, 4]]),
        ("i,j->ij", [[3], [4]]),
        ("i,i->", [[3], [3]]),
        ("ij,jk", [[3, 4], [4, 5]]),
        ("ji", [[3, 4]]),
        ("ij->ij", [[3, 4]]),
        ("...ij,...jk->...ik", [[2, 3, 4], [2, 4, 5]]),
        ("...i->...", [[2, 3, 4]]),
        ("ij,jk,kl->il", [[3, 4], [4, 5], [5, 6]]),
        ("abcde,abfde->abcf", [[2, 2, 3, 2, 2], [2, 2, 4, 2, 2]]),
        ("ij,ij->ij", [[3, 4], [3, 4]]),
        ("ij,kj->", [[3, 4], [2, 4]]),
        ("ab,cd->abcd", [[2, 3], [4, 5]]),
        ("abc,cba->b", [[2, 3, 4], [4, 3, 2]]),
        (" b i , i o -> o b ", [[2, 3], [3, 4]]),
    ],
)
def test_an_einsum_becomes_products_and_sums(equation: str, shapes: list[list[int]]) -> None:
    assert "Einsum" not in operators(rewritten(einsum(equation, *shapes), EINSUM))


def test_a_diagonal_and_open_dimensions_stay() -> None:
    assert untouched(einsum("ii->i", [3, 3]), EINSUM)
    text = '(float[n, 3] x) => (float[3, n] y) { y = Einsum <equation = "ij->ji"> (x) }'
    assert untouched(parsed(text), EINSUM)

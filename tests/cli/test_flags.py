from __future__ import annotations

import pytest

from hatch_epcontext.cli._flags import _value, job_settings


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
def test_a_value_is_toml_or_the_text_itself(text: str, read: object) -> None:
    assert _value(text) == read


def test_the_texts_of_flags_become_values() -> None:
    found = job_settings(
        options=[("soc_model", "60"), ("a", "{ op = { Relu = 'cpu' } }"), ("b", '{"op": {}}')],
        configs=[],
        device=None,
        dims=[("n", "1"), ("a:m", "-2"), ("k", "many")],
        shapes=[("x", "1, 3"), ("y", ""), ("z", "1,n")],
        constants=[("c", "[1.5]"), ("d", "text")],
        inputs="ones",
        settings=[
            ("min-coverage", "0.4"),
            ("min-coverage", "0.5"),
            ("validate.tolerance", "{atol=0.1, outputs={a={snr=10}}}"),
            ("validate.tolerance", "{atol=0.2, outputs={b={snr=20}}}"),
        ],
    )
    assert found.provider_options == {
        "soc_model": "60",
        "a": {"op": {"Relu": "cpu"}},
        "b": '{"op": {}}',
    }
    assert found.dims == {"n": 1, "a:m": -2, "k": "many"}
    assert found.shapes == {"x": [1, 3], "y": [], "z": [1, "n"]}
    assert found.constants == {"c": [1.5], "d": "text"}
    assert found.validate == {"inputs": "ones"}
    assert found.settings == {
        "min-coverage": 0.5,
        "validate.tolerance": {"atol": 0.2, "outputs": {"a": {"snr": 10}, "b": {"snr": 20}}},
    }

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import ConfigError
from tests.config.examples import EVERYTHING, LONG, SHORT
from tests.config.test_shapes import SIZES, several
from tests.fuzzing.mutations import mutated

TABLES = [
    parse(toml)
    for toml in (
        SHORT,
        LONG,
        EVERYTHING,
        several(f'{SIZES}, dims = {{ n = 4 }}, share-weights = "both"'),
        several("dims = [{ n = 1, m = 2 }, { n = 2, m = 2 }]"),
    )
]


def test_what_is_changed_was_valid(project: Path) -> None:
    for table in TABLES[:4]:
        load(project, table, {}, {})


@given(st.sampled_from(TABLES).flatmap(mutated))
@settings(max_examples=max(100, settings().max_examples))
def test_any_configuration_is_valid_or_an_error_in_words(project: Path, table: Any) -> None:
    try:
        load(project, table, {}, {})
    except ConfigError as error:
        text = str(error)
    else:
        return
    assert text.startswith("invalid configuration")

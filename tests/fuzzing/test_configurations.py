from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import ConfigError
from tests.config.examples import EVERYTHING, LONG, SHORT
from tests.fuzzing.mutations import mutated

TABLES = st.sampled_from([parse(toml) for toml in (SHORT, LONG, EVERYTHING)])


@given(TABLES.flatmap(mutated))
def test_any_configuration_is_valid_or_an_error_in_words(project: Path, table: Any) -> None:
    try:
        load(project, table, {}, {})
    except ConfigError as error:
        text = str(error)
    else:
        return
    assert text.startswith("invalid configuration")

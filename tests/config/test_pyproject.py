from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.pyproject import parse, tool_table
from hatch_epcontext.errors import ConfigError, Kind


def test_the_table_of_a_project(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.epcontext]\nprovider = "qnn"\n', encoding="utf-8")
    assert tool_table(tmp_path) == {"provider": "qnn"}
    file.write_text("[project]\n", encoding="utf-8")
    assert tool_table(tmp_path) is None


def test_invalid_toml_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse("no = toml = here")


@pytest.mark.parametrize(("text", "message"), [(None, "is missing."), ("x =", "is not TOML: ")])
def test_an_unusable_pyproject_is_one_problem(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        tool_table(tmp_path)
    (found,) = raised.value.problems
    assert (found.kind, found.location) == (
        Kind.INVALID_PYPROJECT,
        str(tmp_path / "pyproject.toml"),
    )
    assert found.message.startswith(message)

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.pyproject import parse, tool_table


def test_the_table_of_a_project(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.epcontext]\nprovider = "qnn"\n', encoding="utf-8")
    assert tool_table(tmp_path) == {"provider": "qnn"}
    file.write_text("[project]\n", encoding="utf-8")
    assert tool_table(tmp_path) is None


def test_invalid_toml_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse("no = toml = here")

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.pyproject import Lines, PyprojectNames, parse, tool_table
from hatch_epcontext.errors import Key, Setting


def test_the_table_of_a_project(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.epcontext]\ntargets.qnn.provider = "qnn"\n', encoding="utf-8")
    assert tool_table(tmp_path) == {"targets": {"qnn": {"provider": "qnn"}}}
    file.write_text("[project]\n", encoding="utf-8")
    assert tool_table(tmp_path) is None


def test_invalid_toml_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse("no = toml = here")


TABLES = """\
[project]
text = '''
[tool.epcontext]
'''
[tool.epcontext]
targets.cpu.provider = "cpu"
[tool.epcontext.targets.x]
provider-options = { soc_model = 60, htp_arch = 73 }
[[tool.epcontext.models]]
path = "a.onnx"
# shapes = { x = [1, ?] }  # how long is it?
validate.mode = "off"
[[tool.epcontext.models]]
path = "b.onnx"
constants = { sr = 1 }
# constants = { sr = 1, n = ? }
targets = [
    "x",
    "cpu",
]
[[tool.epcontext.models]]
path = "c.onnx"
# dims = { batch = 1, "w#" = ? }
[tool.ruff]
# dims = { x = ? }
"""

LISTS = """\
[tool.epcontext]
models = [
    # one
    "a.onnx",
    { path = "b.onnx" },  # dims = { w = ? }
    { path = "c.onnx", dims = { w = 1 } },
    "d.onnx" ]
output = "x"
"""


@pytest.mark.parametrize(
    ("text", "parts", "line"),
    [
        (TABLES, (), 5),
        (TABLES, ("targets", "cpu", "provider"), 6),
        (TABLES, ("targets", "x", "provider-options", "htp_arch"), 8),
        (TABLES, ("models", 0), 9),
        (TABLES, ("models", 0, "shapes", "x"), 9),
        (TABLES, ("models", 0, "validate", "mode"), 12),
        (TABLES, ("models", 1, "constants", "n"), 15),
        (TABLES, ("models", 1, "targets"), 17),
        (TABLES, ("models", 1, "targets", 1), 19),
        (TABLES, ("models", 1, "dims"), 13),
        (LISTS, ("models",), 2),
        (LISTS, ("models", 1, "dims"), 5),
        (LISTS, ("models", 2, "dims", "w"), 6),
        (LISTS, ("models", 3), 7),
        (LISTS, ("models", 3, "dims"), 7),
        ("no TOML", (), None),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_keys_have_lines(
    text: str, parts: tuple[str | int, ...], line: int | None, ends: str
) -> None:
    assert Lines(text.replace("\n", ends)).of(Key(parts)) == line


def test_messages_name_the_line_of_a_key(tmp_path: Path) -> None:
    key = Key(("models", 0, "shapes", "x"))
    assert PyprojectNames(tmp_path).key(key) == "tool.epcontext.models[0].shapes.x"
    (tmp_path / "pyproject.toml").write_text(TABLES, encoding="utf-8")
    names = PyprojectNames(tmp_path)
    assert names.key(key) == "pyproject.toml:9: tool.epcontext.models[0].shapes.x"
    assert names.setting(Setting(Key(("output",)), "a")) == 'Set tool.epcontext.output = "a"'


@pytest.mark.parametrize(
    ("models", "has_example"),
    [
        ('[tool.epcontext]\nmodels = ["a.onnx"]', True),
        ('[[tool.epcontext.models]]\npath = "a.onnx"', False),
    ],
)
def test_a_table_for_a_model_is_an_example_only_where_it_has_none(
    tmp_path: Path, models: str, has_example: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text(models, encoding="utf-8")
    setting = Setting(Key(("models", 0), "a.onnx") / "dims", {"n": 1})
    text = PyprojectNames(tmp_path).setting(setting)
    assert "dims = { n = 1 }" in text
    assert ("path = " in text) == has_example

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hatch_epcontext
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    Diagnosed,
    Key,
    KeyNames,
    Kind,
    Problem,
    Setting,
    collect,
    merged,
)

PACKAGE = Path(hatch_epcontext.__file__).parent


@pytest.mark.parametrize("url", ["https://bob:secret@host/a.onnx", "https://host/a?sig=secret"])
def test_a_url_in_a_place_is_shown_without_its_credentials(url: str) -> None:
    key = Key(("models", 0, "path"), model=url)
    at_key = Problem.at(key, Kind.FILE_NOT_FOUND, "is no path.")
    unknown = Problem.at(Key((url,)), Kind.UNKNOWN_KEY, "is unknown.")
    for each in (at_key, unknown, Problem(Kind.INVALID_PATH, url, "is no file.")):
        assert "secret" not in each.text() + each.location
        assert "***" in each.text()


def test_a_problem_shows_location_id_message_and_hint() -> None:
    error = ConfigError(
        Problem.at(Key() / "build" / "jobs", Kind.INVALID_VALUE, "must be at least 1.", "Write 1.")
    )
    assert str(error) == (
        "invalid configuration:\n"
        "tool.epcontext.build.jobs: EPC005\n"
        "    must be at least 1.\n"
        "    Write 1."
    )


def test_several_problems_are_counted_and_all_shown() -> None:
    one = Problem(Kind.COMPILE_FAILED, "a", "one")
    two = Problem(Kind.WORKER_CRASHED, "b", "two", log="line 1\nline 2")
    text = str(BuildError(one, two))
    assert "(2 problems):" in text
    assert "a: EPC307\n    one\nb: EPC308\n    two" in text
    assert "    | line 1\n    | line 2" in text


def of_target(target: str, model: str = "a.onnx", message: str = "is bad.") -> Problem:
    key = Key(("models", 0), model)
    lower = Setting(Key() / "targets" / target / "min-coverage", 0.5)
    problem = Problem.at(key, Kind.NOT_COMPILABLE, message, None, Setting(key / "cut"), lower)
    return replace(
        problem, targets=(target,), log=f"12:00:0{len(target)} error in 0x7f{len(target)}"
    )


def test_what_several_targets_have_is_one_problem_with_all_settings() -> None:
    (problem,) = merged(map(of_target, ("aa", "bbb")))
    lines = str(problem).splitlines()
    assert lines[0] == "tool.epcontext.models[0] (a.onnx) -> aa, bbb: EPC218"
    assert [line for line in lines if "Set" in line or "Change" in line] == [
        "    Change cut in the model's table",
        "    Set tool.epcontext.targets.aa.min-coverage = 0.5",
        "    Set tool.epcontext.targets.bbb.min-coverage = 0.5",
    ]


def test_other_models_of_one_key_and_other_messages_are_other_problems() -> None:
    problems = (of_target("a"), of_target("a", "b.onnx"), of_target("a", message="is worse."))
    assert merged((*problems, *problems)) == problems


def test_a_model_with_a_name_is_shown_with_it() -> None:
    key = Key(("models", 0), "models/a.onnx", "digits") / "dims"
    assert KeyNames().key(key) == "tool.epcontext.models[0].dims (digits, models/a.onnx)"


def test_each_kind_has_an_id_of_its_own() -> None:
    assert [kind.name for kind in Kind if not re.fullmatch(r"EPC\d{3}", kind.id)] == []
    # An enum makes a member with a value that exists already an alias, which iteration leaves out.
    assert len(Kind.__members__) == len(list(Kind))


def test_each_kind_is_used() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"\bKind\.([A-Z_]+)\b", source))
    assert sorted(used) == sorted(kind.name for kind in Kind)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key(), "tool.epcontext"),
        (Key() / "build" / "max-size", "tool.epcontext.build.max-size"),
        (Key() / "models" / 0 / "shapes" / "a b", 'tool.epcontext.models[0].shapes."a b"'),
        (Key() / "models" / 12 / "platforms" / 3, "tool.epcontext.models[12].platforms[3]"),
        (Key() / "targets" / "", 'tool.epcontext.targets.""'),
        (Key() / "targets" / '"', r'tool.epcontext.targets."\""'),
        (Key() / "dims" / "0", "tool.epcontext.dims.0"),
    ],
)
def test_a_key_is_written_as_in_toml(key: Key, text: str) -> None:
    assert str(key) == text


def test_a_setting_without_a_value_is_for_the_user_to_choose() -> None:
    assert str(Setting(Key() / "output")) == "tool.epcontext.output"
    assert str(Setting(Key() / "x", value=False)) == "tool.epcontext.x = false"
    assert str(Setting(Key() / "x", {"a b": [1, "c"]})) == (
        'tool.epcontext.x = { "a b" = [1, "c"] }'
    )


class Flags(KeyNames):
    def key(self, key: Key) -> str:
        return f"--{key.parts[-1]}"

    def setting(self, setting: Setting) -> str:
        return f"Add {self.key(setting.key)}={setting.value}"


def test_a_problem_can_name_keys_in_another_way() -> None:
    problem = Problem.at(
        Key() / "models" / 0 / "dims",
        Kind.OPEN_DIMENSION,
        "has an open dimension.",
        "Fix it.",
        Setting(Key() / "models" / 0 / "dim", 3),
        Setting(Key() / "shape", "x"),
    )
    assert problem.text(Flags()) == (
        "--dims: EPC204\n    has an open dimension.\n    Fix it.\n    Add --dim=3\n    Add --shape=x"
    )
    assert "Set dim = 3 in the model's table" in problem.text()
    assert problem.advice(Flags()) == "Fix it.\nAdd --dim=3\nAdd --shape=x"
    assert "--dims: EPC204" in ConfigError(problem).text(Flags())
    assert "tool.epcontext.models[0].dims: EPC204" in str(ConfigError(problem))


def test_collecting_gives_the_value_and_all_problems() -> None:
    one, two = (Problem(Kind.VALUE_MISMATCH, name, "message") for name in "ab")

    def inner() -> Diagnosed[int]:
        yield two
        return 1

    def outer() -> Diagnosed[int]:
        yield one
        return 1 + (yield from inner())

    assert collect(outer()) == (2, [one, two])


def test_a_setting_of_a_model_shows_the_models_table() -> None:
    key = Key(("models", 3), "models/a b.onnx")
    location = "tool.epcontext.models[3] (models/a b.onnx): EPC204"
    problem = Problem.at(key, Kind.OPEN_DIMENSION, "m", None, Setting(key / "dims", {"n": 1}))
    assert problem.text() == (
        f"{location}\n    m\n    Set dims = {{ n = 1 }} in the model's table: "
        '{ path = "models/a b.onnx", dims = { n = 1 } }'
    )
    names = KeyNames()
    assert names.setting(Setting(key / "validate" / "tolerance")) == (
        "Change validate.tolerance in the model's table"
    )
    assert names.setting(Setting(key / "dims" / "n")) == "Set dims.n = ? in the model's table"
    assert names.setting(Setting(Key() / "build" / "timeout", 5)) == (
        "Set tool.epcontext.build.timeout = 5"
    )
    assert names.setting(Setting(Key() / "output")) == "Change tool.epcontext.output"
    # A glob is one item of the list, and several models.
    assert key == Key(("models", 3), "models/other.onnx")

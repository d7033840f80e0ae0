from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.environment import Environment, read_environment


def read(**variables: str) -> Environment:
    settings, problems = read_environment(
        {f"HATCH_EPCONTEXT_{name}": value for name, value in variables.items()}
    )
    assert not problems
    return settings


def test_nothing_is_set_by_default_and_other_variables_do_not_count() -> None:
    assert read_environment({"HATCH_VERBOSE": "1", "PATH": "/bin"}) == (Environment(), [])


def test_all_variables(tmp_path: Path) -> None:
    settings = read(
        SKIP="true",
        TARGETS="a, b,",
        CACHE_DIR=str(tmp_path),
        REPORT=str(tmp_path / "r.html"),
        NO_CACHE="1",
        JOBS="3",
        TIMEOUT="2.5",
        EDITABLE="compile",
        VALIDATE="require",
    )
    assert settings.skip
    assert settings.targets == ("a", "b")
    assert settings.cache_dir == tmp_path
    assert settings.report == tmp_path / "r.html"
    assert settings.no_cache
    assert (settings.jobs, settings.timeout) == (3, 2.5)
    assert (settings.editable, settings.validate) == ("compile", "require")
    assert "HATCH_EPCONTEXT_JOBS=3" in settings.overrides


def test_an_empty_variable_counts_as_unset() -> None:
    assert read(JOBS="", TARGETS="  ") == Environment()


def test_validation_can_be_switched_off() -> None:
    assert read(VALIDATE="false").validate is False


def test_the_cache_folder_is_absolute_wherever_the_build_runs() -> None:
    folder = read(CACHE_DIR="~/models").cache_dir
    assert folder is not None
    assert folder.is_absolute()
    assert "~" not in str(folder)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("JOBS", "0", "a whole number of at least 1"),
        ("JOBS", "many", "a whole number of at least 1"),
        ("TIMEOUT", "-1", "a number of seconds above 0"),
        ("TIMEOUT", "inf", "a number of seconds above 0"),
        ("EDITABLE", "inplace", "source or compile or skip"),
        ("VALIDATE", "yes", "auto or require or structure or false"),
        ("SKIP", "maybe", "1 or 0"),
        ("REPORT", "report.html", "an absolute path"),
        ("TARGET", "x", "is not a variable that is read"),
    ],
)
def test_a_wrong_value_is_a_problem(name: str, value: str, what: str) -> None:
    _, (problem,) = read_environment({f"HATCH_EPCONTEXT_{name}": value})
    assert problem.where == f"HATCH_EPCONTEXT_{name}"
    assert what in problem.what

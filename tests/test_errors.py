from __future__ import annotations

from hatch_epcontext.errors import BuildError, ConfigError, Problem


def test_one_problem_says_where_what_and_what_to_do() -> None:
    error = ConfigError(Problem("tool.epcontext.jobs", "must be at least 1.", "Write 1."))
    assert str(error) == (
        "the configuration is not right:\n"
        "tool.epcontext.jobs\n"
        "    must be at least 1.\n"
        "    Write 1."
    )


def test_several_problems_are_counted_and_all_told() -> None:
    told = str(BuildError(Problem("a", "one"), Problem("b", "two", log="line 1\nline 2")))
    assert "(2 problems):" in told
    assert "a\n    one\nb\n    two" in told
    assert "    | line 1\n    | line 2" in told


def test_wrong_configuration_and_failed_builds_have_their_own_exit_codes() -> None:
    assert (ConfigError.exit_code, BuildError.exit_code) == (2, 1)

from __future__ import annotations

import pytest

from hatch_epcontext.options import (
    MANAGED,
    SESSION_OPTIONS,
    check_options,
    check_session_options,
    render_options,
)
from hatch_epcontext.providers import PROVIDERS

QNN = PROVIDERS["qnn"]


def test_options_of_the_provider_pass() -> None:
    assert not list(check_options("t", {"soc_model": 60}, {"htp_performance_mode": "burst"}, QNN))


@pytest.mark.parametrize(
    ("options", "load_options", "where", "what"),
    [
        ({"soc_mdel": 60}, {}, "t.provider-options.soc_mdel", "is not an option of the qnn provider"),
        ({"htp_arch": 999}, {}, "t.provider-options.htp_arch", "must be one of 0, 68"),
        ({}, {"soc_model": 60}, "t.load-options.soc_model", "only counts when the model is compiled"),
        ({}, {"nope": 1}, "t.load-options.nope", "is not an option"),
        ({"backend_type": "htp", "backend_path": "x"}, {}, "t.provider-options", "exclude one another"),
    ],
)  # fmt: skip
def test_wrong_options(
    options: dict[str, str], load_options: dict[str, str], where: str, what: str
) -> None:
    (problem,) = check_options("t", options, load_options, QNN)
    assert problem.where == where
    assert what in problem.what


def test_a_provider_without_options_says_so() -> None:
    (problem,) = check_options("t", {"x": 1}, {}, PROVIDERS["cpu"])
    assert problem.fix == "The cpu provider has no options."


def test_session_options_are_known_ones_and_the_users_to_set() -> None:
    assert not list(check_session_options("s", {"session.intra_op_num_threads": 1}))
    unknown, managed = check_session_options(
        "s", {"session.intra_op_num_thread": 1, "ep.context_enable": 1}
    )
    assert unknown.where == 's."session.intra_op_num_thread"'
    assert 'Did you mean "session.intra_op_num_threads"?' in unknown.fix
    assert "compiling always does it" in managed.what
    assert not SESSION_OPTIONS & MANAGED.keys()


def test_rendering_leaves_out_what_was_refused() -> None:
    assert render_options({"soc_model": 60, "htp_arch": 999}, QNN) == {"soc_model": "60"}
    assert render_options({"session.x": True}) == {"session.x": "1"}

from __future__ import annotations

import pytest

from hatch_epcontext.providers import FLAVOURS, PROVIDERS, Option, Provider, render
from hatch_epcontext.structure import from_json, to_json

QNN = PROVIDERS["qnn"]


def test_a_provider_is_registered_by_its_module_alone() -> None:
    assert list(PROVIDERS) == ["cpu", "qnn"]


@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=str)
def test_what_every_provider_has_to_say(provider: Provider) -> None:
    assert set(provider.flavours) <= set(FLAVOURS)
    assert provider.devices
    assert provider.defaults.keys() <= provider.options.keys()
    assert all(group <= provider.options.keys() for group in provider.exclusive)
    for name, value in provider.defaults.items():
        assert provider.options[name].render(value) == value


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        (Option(kind="bool"), True, "1"),
        (Option(kind="bool"), False, "0"),
        (Option(kind="bool"), "1", "1"),
        (Option(kind="bool"), 0, "0"),
        (Option(kind="int"), 60, "60"),
        (Option(kind="int"), "60", "60"),
        (Option(choices=("73", "75")), 73, "73"),
        (Option(), "a/path", "a/path"),
    ],
)
def test_toml_values_become_the_strings_that_eps_want(
    option: Option, value: bool | int | str, text: str
) -> None:
    assert option.render(value) == text


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        (Option(kind="bool"), "yes", "true or false"),
        (Option(kind="bool"), 2, "true or false"),
        (Option(kind="int"), "many", "a whole number"),
        (Option(kind="int"), True, "a whole number"),
        (Option(kind="int"), 1.5, "a whole number"),
        (Option(kind="int", minimum=0, maximum=3), 4, "a whole number at least 0 at most 3"),
        (Option(choices=("73", "75")), 999, "one of 73, 75"),
        (Option(), 3, "a string"),
    ],
)
def test_impossible_values_are_refused(option: Option, value: float | str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        option.render(value)


def test_render() -> None:
    assert [render(value) for value in (True, 1, 1.5, "x")] == ["1", "1", "1.5", "x"]


def test_defaults_are_filled_in_and_give_way() -> None:
    assert QNN.complete({"soc_model": "60"}) == {"backend_type": "htp", "soc_model": "60"}
    assert QNN.complete({"backend_type": "gpu"}) == {"backend_type": "gpu"}
    assert QNN.complete({"backend_path": "/lib/x.so"}) == {"backend_path": "/lib/x.so"}


def test_only_what_loading_needs_is_for_loading() -> None:
    options = {"backend_type": "htp", "soc_model": "60", "htp_performance_mode": "burst"}
    assert QNN.loading(options) == {"backend_type": "htp", "htp_performance_mode": "burst"}


@pytest.mark.parametrize(
    ("asked", "disagreement"),
    [
        ({"htp_arch": "73", "soc_model": "60"}, ""),
        ({"htp_arch": "0", "soc_model": "60"}, ""),
        ({}, ""),
        ({"htp_arch": "75"}, "htp_arch = 75 was asked for and the EP compiled for 73"),
        ({"soc_model": "43"}, "soc_model = 43 was asked for and the EP compiled for 60"),
    ],
)
def test_qnn_compatibility_string_tells_what_was_compiled(
    asked: dict[str, str], disagreement: str
) -> None:
    assert QNN.disagreement("v2:6:2.51.0:5.51.0:73:60:0:0", asked) == disagreement


def test_a_compatibility_string_of_an_unknown_form_tells_nothing() -> None:
    assert QNN.disagreement("", {"htp_arch": "73"}) == ""
    assert QNN.disagreement("v9:whatever", {"htp_arch": "73"}) == ""


def test_qnn_names_the_arch_that_its_soc_has() -> None:
    assert QNN.contradictions({"soc_model": "60", "htp_arch": "73"}) == {}
    assert QNN.contradictions({"soc_model": "12345", "htp_arch": "75"}) == {}
    (what,) = QNN.contradictions({"soc_model": "60", "htp_arch": "75"}).values()
    assert "soc_model 60 has HTP architecture 73" in what


def test_where_qnn_contexts_can_be_run() -> None:
    assert QNN.runs_on("linux", "x86_64")
    assert QNN.runs_on("win32", "AMD64")
    assert not QNN.runs_on("linux", "aarch64")
    assert not QNN.runs_on("darwin", "x86_64")


def test_where_qnn_can_be_installed() -> None:
    assert QNN.unavailable((3, 11), "linux") == ""
    assert QNN.unavailable((3, 10), "linux") == "needs Python 3.11 or newer, and this is 3.10"
    assert QNN.unavailable((3, 13), "darwin") == "has no packages for this system, darwin"
    assert PROVIDERS["cpu"].unavailable((3, 10), "darwin") == ""


def test_plugins_survive_the_way_into_the_manifest() -> None:
    assert QNN.plugin is not None
    assert from_json(to_json(QNN.plugin), type(QNN.plugin)) == QNN.plugin

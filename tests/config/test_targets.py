from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.config.targets import is_path
from hatch_epcontext.providers import PROVIDERS, Plugin, Provider
from tests.config.examples import one, target


@pytest.mark.parametrize(
    "provider",
    [p for p in PROVIDERS.values() if not p.needs_library],
    ids=lambda provider: provider.name,
)
def test_every_provider_needs_no_more_than_its_name(project: Path, provider: Provider) -> None:
    found = target(project, f'targets.{provider.ep}.provider = "{provider.ep}"')
    assert found.provider is provider
    # The target has the name that the provider was given by.
    assert found.name == provider.ep
    assert found.settings.provider == provider.name
    assert found.settings.ep == provider.ep
    assert found.settings.device == provider.devices[0]


def test_the_library_of_any_other_ep(project: Path) -> None:
    library = 'library = "some_ep"\nep-name = "SomeEP"\nprovider-options = { x = true }'
    toml = one("plugin", f"{library}")
    found = target(project, toml)
    assert found.provider.ep == found.settings.ep == "SomeEP"
    assert found.provider.plugin == Plugin("some_ep", "some_ep", "SomeEP")
    assert found.settings.provider_options == {"x": "1"}
    assert found.settings.device == "any"


def test_a_library_may_be_a_path(project: Path) -> None:
    (project / "ep").mkdir()
    (project / "ep" / "plugin.so").touch()
    toml = one("plugin", 'ep-name = "SomeEP"\nlibrary = ')
    found = target(project, f'{toml}"ep/plugin.so"').provider.plugin
    assert found == Plugin("", "its library", "SomeEP", str(project / "ep" / "plugin.so"))
    absolute = target(project, f'{toml}"{(project / "ep" / "plugin.so").as_posix()}"').provider
    assert absolute.plugin is not None
    assert Path(absolute.plugin.path) == project / "ep" / "plugin.so"


def test_a_known_ep_may_be_a_library_too(project: Path) -> None:
    found = target(project, one("vitisai", 'library = "amd_ep"')).provider
    assert (found.ep, found.options) == ("VitisAIExecutionProvider", PROVIDERS["vitisai"].options)
    assert found.plugin == Plugin("amd_ep", "amd_ep", "VitisAIExecutionProvider")
    assert "onnxruntime" in found.distributions
    assert found.requirements == ()


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        *((name, True) for name in ("a/b.so", "b.so", "b.dll", "./b", "C:\\ep\\b.dll")),
        *((name, False) for name in ("some.ep", "onnxruntime_qnn")),
    ],
)
def test_a_library_with_a_suffix_or_a_slash_is_a_path(library: str, expected: bool) -> None:
    assert is_path(library) is expected

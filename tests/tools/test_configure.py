from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.settings import Config
from hatch_epcontext.config.tables import ToleranceTable
from hatch_epcontext.errors import ConfigError
from hatch_epcontext.tools.configure import configure, name_models, nested


def test_models_have_the_names_of_their_files() -> None:
    paths = [Path("a.onnx"), Path("x/my model.v2.onnx"), Path("_.onnx")]
    assert list(name_models(paths)) == ["a", "my_model.v2", "model"]
    assert list(name_models([Path("a.onnx")], Path("out/b_ctx.onnx"))) == ["b"]
    with pytest.raises(ConfigError, match="both have the name a"):
        name_models([Path("a.onnx"), Path("x/a.onnx")])


def config(folder: Path, settings: Mapping[str, Any]) -> Config:
    paths = {name: folder / f"{name}.onnx" for name in ("a", "b")}
    for path in paths.values():
        path.touch()
    return configure(paths, "cpu", settings)


def test_a_key_with_a_models_name_counts_for_that_model(tmp_path: Path) -> None:
    dims = {"n": 1, "a:m": 2, "b:m": 3, "c:m": 4}
    tables = {"dims": dims, "shapes": {"b:x": (1, 3)}, "constants": {"a:y": [1.5]}}
    found = config(tmp_path, tables)
    a, b = found.models
    assert a.dims == {"n": 1, "m": 2, "c:m": 4}
    assert b.dims == {"n": 1, "m": 3, "c:m": 4}
    assert (a.shapes, b.shapes) == ({}, {"x": (1, 3)})
    assert (a.constants, b.constants) == ({"y": [1.5]}, {})


def test_any_other_key_goes_to_its_table(tmp_path: Path) -> None:
    settings = {"validate": "require", "min-coverage": 0.5, "build.timeout": 5.0}
    found = config(tmp_path, settings)
    assert found.build.timeout == 5
    for model in found.models:
        assert (model.validate.mode, model.targets[0].min_coverage) == ("require", 0.5)


def test_dotted_keys_are_tables_and_tables_are_merged(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    settings = nested(
        {"validate.inputs": tmp_path / "x.npz", "validate": "structure"},
        {"validate": {"mode": "require"}, "validate.tolerance": {"atol": 0.1}},
        {"validate.tolerance.rtol": 0.2},
    )
    for model in config(tmp_path, settings).models:
        assert model.validate.mode == "require"
        assert model.validate.inputs == str(tmp_path / "x.npz")
        assert model.validate.tolerance == ToleranceTable(atol=0.1, rtol=0.2)
    found = config(tmp_path, {"validate": "require", "validate.tolerance": False})
    assert found.models[0].validate.mode == "require"
    assert found.models[0].validate.tolerance is False


@pytest.mark.parametrize(
    "key",
    ["models", "provider", "path", "url", "output", "wheel.tag", "editable"],
)
def test_keys_of_flags_and_of_wheels_cannot_be_set(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="is not a key that can be set"):
        config(tmp_path, {key: "x"})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("min-coverag", "min-coverage"),
        ("validate.tolerence.atol", "tolerance"),
        ("build.timeot", "timeout"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(tmp_path: Path, key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f'Did you mean "{name}"'):
        config(tmp_path, {key: 1})


def test_variables_about_the_build_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_cache: Path
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_JOBS", "3")
    monkeypatch.setenv("HATCH_EPCONTEXT_TIMEOUT", "5")
    monkeypatch.setenv("HATCH_EPCONTEXT_TARGETS", "x-elite")
    monkeypatch.setenv("HATCH_EPCONTEXT_VALIDATE", "false")
    found = config(tmp_path, {})
    assert (found.build.jobs, found.build.timeout) == (3, 5)
    assert found.models[0].validate.mode == "auto"
    assert found.environment.cache_dir == user_cache


def test_a_setting_wins_over_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_TIMEOUT", "0.1")
    monkeypatch.setenv("HATCH_EPCONTEXT_JOBS", "3")
    found = config(tmp_path, {"build.timeout": 600.0})
    assert (found.build.timeout, found.build.jobs) == (600, 3)
    monkeypatch.setenv("HATCH_EPCONTEXT_TIMEOUT", "never")
    assert config(tmp_path, {"build.timeout": 600.0}).build.timeout == 600

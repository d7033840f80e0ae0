from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.settings import CompileSettings, Quantize
from hatch_epcontext.config.tables import ToleranceTable, ValidateTable
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.cache.fingerprint import fingerprint
from hatch_epcontext.jobs.plan import Job, plan
from tests.results import configured

SHA256 = {"a": "00"}
VERSIONS = {"onnxruntime": "1.31.1"}

CHANGED: dict[str, Any] = {
    "provider": "other",
    "ep": "OtherExecutionProvider",
    "registration_name": "other",
    "library_module": "other",
    "library_sha256": "11",
    "provider_options": {"a": "1"},
    "session_options": {"a": "1"},
    "device": "gpu",
    "device_filter": {"vendor": "x"},
    "virtual_devices": True,
    "compile_with": "library",
    "compute_capabilities": ("8.9",),
    "optimization": "all",
    "static_shapes": True,
    "embed": True,
    "from_memory": True,
    "external_initializers": True,
    "unroll_limit": 1,
    "recompile": True,
    "dequantize": "all",
    "quantize": Quantize("uint8"),
}
"""Another value for each field of `CompileSettings`."""


@pytest.fixture
def job(project: Path) -> Job:
    return plan(configured(project)).jobs[0]


def with_settings(job: Job, settings: CompileSettings) -> Job:
    return dataclasses.replace(job, target=dataclasses.replace(job.target, settings=settings))


def with_model(job: Job, **changes: Any) -> Job:
    (model,) = job.models
    return dataclasses.replace(job, models=(dataclasses.replace(model, **changes),))


def test_a_fingerprint_does_not_depend_on_order(job: Job) -> None:
    options = {"b": "1", "a": "2"}
    one, other = (
        with_settings(job, dataclasses.replace(job.target.settings, provider_options=each))
        for each in (options, dict(sorted(options.items())))
    )
    assert fingerprint(one, SHA256, VERSIONS) == fingerprint(other, SHA256, VERSIONS)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CompileSettings)])
def test_every_compile_setting_changes_the_fingerprint(job: Job, name: str) -> None:
    settings = dataclasses.replace(job.target.settings, **{name: CHANGED[name]})
    assert settings != job.target.settings
    changed = with_settings(job, settings)
    assert fingerprint(changed, SHA256, VERSIONS) != fingerprint(job, SHA256, VERSIONS)


@dataclass(frozen=True, kw_only=True)
class WiderSettings(CompileSettings):
    """The settings of a future release, with one field more."""

    new_key: str


def test_a_new_compile_setting_changes_the_fingerprint(job: Job) -> None:
    fields = dataclasses.asdict(job.target.settings)
    one, other = (
        with_settings(job, WiderSettings(**fields, new_key=value)) for value in ("one", "other")
    )
    assert fingerprint(one, SHA256, VERSIONS) != fingerprint(other, SHA256, VERSIONS)
    assert fingerprint(one, SHA256, VERSIONS) != fingerprint(job, SHA256, VERSIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": {"n": 1}},
        {"shapes": {"x": (1, 2)}},
        {"constants": {"sr": 16000}},
        # Without a comparison, preparation may accept the result of another simplifier.
        {"validate": ValidateTable(tolerance=False)},
        {"validate": ValidateTable(mode=False)},
    ],
)
def test_a_models_settings_change_the_fingerprint(job: Job, changes: dict[str, Any]) -> None:
    changed = with_model(job, **changes)
    assert fingerprint(changed, SHA256, VERSIONS) != fingerprint(job, SHA256, VERSIONS)


def test_contents_members_and_versions_change_the_fingerprint(job: Job) -> None:
    same = fingerprint(job, SHA256, VERSIONS)
    assert fingerprint(job, {"a": "01"}, VERSIONS) != same
    assert fingerprint(job, SHA256, {"onnxruntime": "1.32"}) != same
    twice = dataclasses.replace(job, models=job.models * 2)
    assert fingerprint(twice, SHA256, VERSIONS) != same


@pytest.mark.parametrize(
    "changes",
    [
        {"path": Path("/elsewhere/a.onnx")},
        {"validate": ValidateTable(states={"h": "hn"})},
        {
            "validate": ValidateTable(
                mode="require", inputs="ones", tolerance=ToleranceTable(rtol=0.5)
            )
        },
    ],
)
def test_paths_and_validation_do_not_change_the_fingerprint(
    job: Job, changes: dict[str, Any]
) -> None:
    changed = with_model(job, **changes)
    assert fingerprint(changed, SHA256, VERSIONS) == fingerprint(job, SHA256, VERSIONS)


def test_load_options_and_coverage_do_not_change_the_fingerprint(job: Job) -> None:
    target = dataclasses.replace(job.target, load_options={"a": "1"}, min_coverage=0.1)
    changed = dataclasses.replace(job, target=target)
    assert fingerprint(changed, SHA256, VERSIONS) == fingerprint(job, SHA256, VERSIONS)


def test_where_it_is_compiled_does_not_change_the_fingerprint(job: Job) -> None:
    target = dataclasses.replace(job.target, resources={"NPU": 1})
    changed = dataclasses.replace(job, target=target)
    assert fingerprint(changed, SHA256, VERSIONS) == fingerprint(job, SHA256, VERSIONS)

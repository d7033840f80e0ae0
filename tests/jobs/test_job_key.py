from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.config.settings import CompileSettings, Model
from hatch_epcontext.config.tables import ToleranceTable, ValidateTable
from hatch_epcontext.jobs.plan import _NOT_COMPILED, Job, model_settings, plan
from tests.results import configured

SHA256 = ["00"]

SIZED = 'targets.npu.provider = "qnn"\nmodels = [{}{{ path = "models/a.onnx", dims = [{}] }}]\n'

CHANGED: dict[str, Any] = {
    "provider": "other",
    "ep": "OtherExecutionProvider",
    "library_module": "other",
    "library_sha256": "11",
    "provider_options": {"a": "1"},
    "session_options": {"a": "1"},
    "device": "gpu",
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
    "quantize": "uint8",
}
"""Another value for each field of `CompileSettings`."""


@pytest.fixture
def job(project: Path) -> Job:
    return plan(configured(project)).jobs[0]


def with_settings(job: Job, settings: CompileSettings) -> Job:
    return dataclasses.replace(job, target=dataclasses.replace(job.target, settings=settings))


def test_a_fingerprint_does_not_depend_on_order(job: Job) -> None:
    options = {"b": "1", "a": "2"}
    one, other = (
        with_settings(job, dataclasses.replace(job.target.settings, provider_options=ordered))
        for ordered in (options, dict(sorted(options.items())))
    )
    assert one.fingerprint(SHA256) == other.fingerprint(SHA256)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CompileSettings)])
def test_every_compile_setting_changes_the_fingerprint(job: Job, name: str) -> None:
    settings = dataclasses.replace(job.target.settings, **{name: CHANGED[name]})
    assert settings != job.target.settings
    changed = with_settings(job, settings)
    assert changed.fingerprint(SHA256) != job.fingerprint(SHA256)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"dims": {"n": 1}}, True),
        ({"shapes": {"x": (1, 2)}}, True),
        ({"constants": {"sr": 16000}}, True),
        # Without a comparison, preparation may accept the result of another simplifier.
        ({"validate": ValidateTable(tolerance=False)}, True),
        ({"validate": ValidateTable(mode=False)}, True),
        ({"validate": ValidateTable(mode="require", inputs="ones")}, False),
        ({"validate": ValidateTable(tolerance=ToleranceTable(rtol=0.5))}, False),
        ({"validate": ValidateTable(states={"h": "hn"})}, False),
        ({"validate": ValidateTable(ranges={"h": (0, 9)})}, False),
        ({"path": Path("/elsewhere/a.onnx")}, False),
    ],
)
def test_what_is_fixed_in_a_model_counts_and_where_it_is_and_how_it_is_validated_does_not(
    job: Job, changes: dict[str, Any], counts: bool
) -> None:
    (model,) = job.models
    changed = dataclasses.replace(job, models=(dataclasses.replace(model, **changes),))
    assert (changed.fingerprint(SHA256) != job.fingerprint(SHA256)) is counts


def test_where_a_model_and_its_sizes_are_listed_does_not_count(
    project: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / "other"
    shutil.copytree(project, elsewhere)

    def keys_of_a(root: Path, toml: str) -> dict[str, str]:
        jobs = plan(configured(root, toml)).jobs
        return {job.name: job.fingerprint(SHA256) for job in jobs if job.name != "b"}

    keys = keys_of_a(project, SIZED.format("", "{ n = 1 }, { n = 2 }"))
    assert keys.keys() == {"a.n1", "a.n2"}
    moved = SIZED.format('"models/b.onnx", ', "{ n = 2 }, { n = 1 }")
    assert keys_of_a(project, moved) == keys
    assert keys_of_a(elsewhere, moved) == keys


def test_what_counts_has_no_path_and_no_key_of_the_configuration(project: Path) -> None:
    assert {field.name for field in dataclasses.fields(Model)} >= _NOT_COMPILED
    jobs = plan(configured(project, SIZED.format("", "{ n = 1 }, { n = 2 }"))).jobs
    for job in jobs:
        hashed = repr(([model_settings(model) for model in job.models], job.target.settings))
        assert not re.search(r"\b(Key|\w*Path)\(", hashed)
        assert str(project) not in hashed


def test_contents_and_members_change_the_fingerprint(job: Job) -> None:
    same = job.fingerprint(SHA256)
    assert job.fingerprint(["01"]) != same
    twice = dataclasses.replace(job, models=job.models * 2)
    assert twice.fingerprint(SHA256 * 2) != same


def test_how_it_is_loaded_and_where_it_is_compiled_does_not_count(job: Job) -> None:
    target = dataclasses.replace(
        job.target, load_options={"a": "1"}, min_coverage=0.1, resources={"NPU": 1}
    )
    changed = dataclasses.replace(job, target=target)
    assert changed.fingerprint(SHA256) == job.fingerprint(SHA256)

"""A wheel whose models come from a shared cache, with a real front end and a real S3 server."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from hatch_epcontext.cache.signing import new_keys
from tests.conftest import REPOSITORY, needs_qnn
from tests.integration.conftest import UV, run
from tests.projects import make_project
from tests.remotes import S3_KEY, S3_SECRET, make_bucket, s3_server, s3_variables

TOML = """
models = [{{ path = "models/a.onnx", dims = {{ batch = 1 }} }}]
build = {{ shared-cache = "{url}", shared-cache-keys = ["{key}"] }}
[tool.epcontext.targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
[tool.epcontext.targets.any]
provider = "cpu"
"""


@pytest.mark.network
@needs_qnn
def test_a_machine_without_onnx_runtime_builds_the_wheel_from_a_bucket(
    tmp_path: Path, env: dict[str, str]
) -> None:
    with s3_server() as server:
        env = {**env, **s3_variables(server), "PYTHONPATH": str(REPOSITORY)}
        private, public = new_keys()
        url = f"s3://{make_bucket(server)}/team"
        project = make_project(tmp_path / "project", TOML.format(url=url, key=public))
        # Only machines that compile may write.
        env["HATCH_EPCONTEXT_SHARED_CACHE_KEY"] = private

        def build(machine: str, *options: str, **settings: str) -> str:
            settings = {"CACHE_DIR": str(tmp_path / machine), **settings}
            variables = {f"HATCH_EPCONTEXT_{name}": value for name, value in settings.items()}
            return run(
                sys.executable, "-m", "build", "-w", *(options or (UV,)), "-o", tmp_path / machine, project,
                cwd=project, env={**env, **variables},
            )  # fmt: skip

        # Without isolation: what it needs is installed here.
        compiled = build("first", "-nx", SHARED_CACHE_WRITE="1")
        assert "from the cache" not in compiled
        del env["HATCH_EPCONTEXT_SHARED_CACHE_KEY"]
        taken = build("last", FROM_CACHE="all")
    assert "s3fs" in taken
    assert "onnxruntime" not in taken
    assert taken.count("from the cache") == 2
    assert "warning" not in taken.lower()
    (wheel,) = (tmp_path / "last").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "my_app/epcontext/a/npu/a_ctx.onnx" in names
    assert "my_app/epcontext/a/any/a_optimized.onnx" in names
    for secret in (S3_KEY, S3_SECRET, private):
        assert secret not in taken + compiled

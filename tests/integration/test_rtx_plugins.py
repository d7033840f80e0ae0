"""Language models that NVIDIA's library compiles with the EP's plugins, without a GPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes
import onnx
import pytest

from hatch_epcontext.graph import graph
from tests.conftest import needs
from tests.integration.conftest import build_project, run
from tests.language_models import make_folder
from tests.projects import make_project

pytestmark = [needs("tensorrt_rtx_bindings"), needs("onnxruntime_ep_nv_tensorrt_rtx")]

TOML = """
[[tool.epcontext.models]]
path = "models/half"
[[tool.epcontext.models]]
path = "models/int4"
[[tool.epcontext.models]]
path = "models/bfloat16"
fallback = "none"
validate.tolerance = false
[tool.epcontext.targets.rtx]
provider = "tensorrt-rtx"
chip = ["rtx-30", "rtx-40", "rtx-50"]
"""

DRIVER = """
#define F(name) int name(void) { return 100; }
F(cuFuncSetAttribute) F(cuInit) F(cuLaunchKernel) F(cuModuleGetFunction) F(cuModuleLoadData)
F(cuModuleUnload)
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
"""
"""A stand-in for the driver's libcuda.so.1 on a machine without a GPU: all calls find no device."""


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """The folder with the driver's library."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    soname = "libcuda.so.1"
    run(
        compiler,
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{soname}",
        "-o",
        soname,
        "driver.c",
        cwd=tmp_path,
        env=os.environ,
    )
    return str(tmp_path)


def test_folders_become_one_engine_each(tmp_path: Path, driver: str) -> None:
    project = make_project(tmp_path / "project", TOML)
    models = project / "models"
    make_folder(models / "half", "float16")
    make_folder(models / "int4", "float16", int4=True)
    make_folder(models / "bfloat16", ml_dtypes.bfloat16)
    wheel, text = build_project(project, LD_LIBRARY_PATH=driver)
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    for name in ("half", "int4", "bfloat16"):
        folder = tmp_path / "wheel" / "my_app" / "epcontext" / name / "rtx"
        (node,) = onnx.load(folder / f"{name}_ctx.onnx").graph.node
        assert graph.operator(node) == f"com.microsoft.{graph.CONTEXT_OP}"
        assert (folder / f"{name}_ctx.engine").stat().st_size > 10**5
    assert text.count("structure checked, NOT run") == 3

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.errors import ConfigError, Kind
from hatch_epcontext.package.dependencies import check_app, too_new_files
from tests.jobs.test_plan import config
from tests.models import parsed, save


@pytest.mark.parametrize(
    ("ir_version", "opset", "dependency", "bound"),
    [
        (8, 17, "onnxruntime", None),
        (9, 18, "onnxruntime", "onnxruntime>=1.15"),
        (10, 21, "onnxruntime>=1.18", None),
        (10, 22, "onnxruntime-gpu>=1.20,<2; sys_platform == 'win32'", "onnxruntime-gpu>=1.21"),
        (11, 23, "onnxruntime>=1.23", None),
        (13, 24, "onnxruntime>=1.23", "onnxruntime>=1.24"),
        (13, 24, "onnxruntime==1.24.*", None),
        (8, 26, "onnxruntime~=1.24.4", "onnxruntime>=1.25"),
        (13, 24, "numpy>=2", None),
        (13, 24, "onnxruntime-qnn>=2", None),
    ],
)
def test_the_bound_that_opens_the_files_is_named(
    tmp_path: Path, ir_version: int, opset: int, dependency: str, bound: str | None
) -> None:
    text = "(float[1] x) => (float[1] y) { y = Relu (x) }"
    model = parsed(text, opset, ir_version, check=False)
    model.opset_import.add(domain="ai.onnx.ml", version=5)
    save(model, tmp_path / "a.onnx")
    warnings = list(too_new_files(tmp_path, ["a.onnx"], [dependency]))
    assert len(warnings) == (bound is not None)
    assert bound is None or "cannot open a.onnx: the IR" in warnings[0]
    assert bound is None or warnings[0].endswith(f"Depend on {bound}.")


@pytest.mark.parametrize(
    ("dependency", "fits"),
    [
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.5", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0rc1", True),
        ("onnxruntime_ep_nv_tensorrt_rtx_cu12==0.5.3", True),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu13>=0.6", False),
        ("onnxruntime-ep-nv-tensorrt-rtx-cu12<0.5; sys_platform == 'win32'", False),
        ("onnxruntime-qnn<1", True),
    ],
)
def test_the_app_needs_an_ep_that_runs_what_the_library_compiles(
    project: Path, installed: dict[str, str], dependency: str, fits: bool
) -> None:
    keys = 'provider = "tensorrt-rtx"\nchip = "rtx-40"'
    toml = f'models = ["models/a.onnx"]\n[targets.rtx]\n{keys}'
    target = config(project, toml).targets[0]
    # Of a release without a known EP nothing is known.
    for version in ("", "9.1.2"):
        installed |= {"tensorrt-rtx-cu13-bindings": version} if version else {}
        check_app([target], [dependency])
    installed["tensorrt-rtx-cu13-bindings"] = "1.7.1.116"
    if fits:
        check_app([target], ["numpy", dependency])
        return
    with pytest.raises(ConfigError) as raised:
        check_app([target], ["numpy", dependency])
    (problem,) = raised.value.problems
    assert (problem.kind, problem.key) == (Kind.CONFLICTING_REQUIREMENTS, target.key)

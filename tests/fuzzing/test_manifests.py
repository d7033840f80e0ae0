from __future__ import annotations

import json
import shutil
from pathlib import Path

from hypothesis import given

from hatch_epcontext import loader
from hatch_epcontext.errors import InspectionError
from hatch_epcontext.package.bundle import bundle
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.tools.inspecting import inspect
from tests.fuzzing.mutations import mutated
from tests.results import MODULES, compiled, configured

TARGETS = """
models = ["models/a.onnx"]
fallback = "source"
[targets.npu]
provider = "openvino"
device = "npu"
[targets.cpu]
provider = "cpu"
"""


def test_any_manifest_is_read_or_an_error_in_words(project: Path, tmp_path: Path) -> None:
    result = compiled(configured(project, TARGETS), tmp_path / "artifacts")
    # A copy has no links to the sources.
    folder = shutil.copytree(bundle(result, tmp_path, MODULES).folder, tmp_path / "installed")
    manifest = json.loads((folder / FILE).read_text(encoding="utf-8"))

    @given(mutated(manifest))
    def check(content: object) -> None:
        (folder / FILE).write_text(json.dumps(content), encoding="utf-8")
        try:
            (package,) = inspect(folder).packages.values()
            problem = "none"
            if package.layout == "portable":
                files = {folder / v.model_file for c in package.components.values()
                         for v in c.variants.values()}  # fmt: skip
                assert all(file.resolve().is_relative_to(folder.resolve()) for file in files)
        except InspectionError as error:
            problem = str(error)
        assert problem
        try:
            for name in loader.models(folder):
                with loader.path(name, package=folder) as found:
                    assert found.resolve().is_relative_to(folder.resolve())
        except loader.LoadError as error:
            problem = str(error)
        assert problem

    check()

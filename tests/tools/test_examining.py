from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.tools.examining import Project


@pytest.mark.parametrize(
    ("system", "backend"),
    [
        (None, "hatchling"),
        ({"requires": []}, "setuptools"),
        ({"build-backend": "hatchling.build"}, "hatchling"),
        ({"build-backend": "setuptools.build_meta:__legacy__"}, "setuptools"),
        ({"build-backend": "poetry.core.masonry.api"}, "poetry"),
        ({"build-backend": "pdm.backend"}, "pdm"),
        ({"build-backend": "scikit_build_core.build"}, "scikit_build_core"),
        ({"build-backend": "mesonpy"}, "mesonpy"),
    ],
)
def test_the_backend_has_its_import_name(tmp_path: Path, system: Any, backend: str) -> None:
    values = {} if system is None else {"build-system": system}
    assert Project(tmp_path, values).backend == backend


def test_a_project_with_only_a_setup_script_is_one_of_setuptools(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    assert Project(tmp_path, {}).backend == "setuptools"

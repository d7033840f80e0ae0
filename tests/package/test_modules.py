from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from hatch_epcontext.package.modules import import_name, import_name_in_tree, modules
from hatch_epcontext.package.pyinstaller import get_hook_dirs
from tests.models import network, save
from tests.results import configured


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("my_app/epcontext", "my_app.epcontext"),
        ("models", "models"),
        ("my-app/epcontext", None),
        ("my_app/class", None),
        ("my_app/1", None),
        ("", None),
    ],
)
def test_the_name_by_which_python_imports_a_folder(path: str, name: str | None) -> None:
    assert import_name(PurePosixPath(path)) == name


def test_the_name_by_which_python_imports_a_folder_of_a_source_tree(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "my_app" / "sub"
    folder.mkdir(parents=True)
    # The folder itself may not be there yet.
    assert import_name_in_tree(folder / "epcontext") is None
    (folder / "__init__.py").touch()
    assert import_name_in_tree(folder / "epcontext") == "sub.epcontext"
    (folder.parent / "__init__.py").touch()
    assert import_name_in_tree(folder / "epcontext") == "my_app.sub.epcontext"
    assert import_name_in_tree(folder / "my-models") is None


def test_the_hook_of_pyinstaller_has_the_name_of_the_package() -> None:
    assert list(modules("my_app.epcontext", ())) == [
        "__init__.py",
        "__pyinstaller/__init__.py",
        "__pyinstaller/hook-my_app.epcontext.py",
    ]
    assert list(modules(None, ())) == ["__init__.py"]
    (folder,) = get_hook_dirs()
    # Beside the function, wherever it is installed.
    assert {path.name for path in Path(folder).iterdir()} >= {"__init__.py", "hook.py"}


@pytest.mark.parametrize("recompile", ["true", "false"])
def test_modules_are_shipped_only_where_a_model_needs_them(tmp_path: Path, recompile: str) -> None:
    toml = f"""
    models = ["models/a.onnx", "models/b.onnx"]
    [targets.cpu]
    provider = "cpu"
    [targets.npu]
    provider = "qnn"
    provider-options = {{ soc_model = 60, htp_arch = 73 }}
    recompile = {recompile}
    """
    for name in ("a", "b"):
        save(network(), tmp_path / "models" / f"{name}.onnx")
    shipped = modules(None, configured(tmp_path, toml).models)
    assert ("_recompile.py" in shipped) == (recompile == "true")

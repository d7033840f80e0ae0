"""Manifests that are wrong, or name other places."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext import loader
from hatch_epcontext.shipped import METADATA
from tests.loader.shipped import CPU, OUTSIDE, SOURCE, Shipper, changed, component, sealed, variant
from tests.models import network, save


def test_an_installed_package_names_files_anywhere(ship: Shipper, tmp_path: Path) -> None:
    """As editable installs do; on Windows also on another drive."""
    one = save(network(), tmp_path / "elsewhere/one.onnx")
    save(network(), tmp_path / "two.onnx")
    variants = {
        "absolute": variant(".", str(one)),
        "folder": variant(str(one.parent), one.name),
        "parent": variant("..", "two.onnx"),
    }
    for target, each in variants.items():
        app = ship.write({"m": component({target: each}, "m")}, layout="installed")
        assert app.explain("m")[0].outcome == "opened", target
        app = ship.write({"m": component({target: each}, "m")})
        with pytest.raises(app.LoadError, match="outside of the package"):
            app.load("m")


def test_on_windows_a_drive_is_an_absolute_path() -> None:
    assert loader.join("a/b", "C:/models/m.onnx") == "C:/models/m.onnx"
    assert loader.join("a/b", "//server/share/m.onnx") == "//server/share/m.onnx"
    assert loader.join("a/b", "c/m.onnx") == "a/b/c/m.onnx"
    assert loader.join("", "c") == "c"


BAD_TEXTS: dict[str, str | bytes] = {
    "empty": "",
    "other bytes": b'{"\xff',
    "text": "models: []",
    "a comment": '{"schema_version": "1.0"} // text',
    "deep": "[" * 100_000 + "]" * 100_000,
    "a list": "[]",
    "null": "null",
    "deep in an object": (
        '{"schema_version": "1.0", "components": ' + '{"a":' * 100_000 + "1" + "}" * 100_001
    ),
    "no schema": '{"components": {}}',
    "schema 2.0": '{"schema_version": "2.0", "new": 1}',
    "a float schema": '{"schema_version": 1.0}',
    "no components": '{"schema_version": "1.0"}',
}


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_a_manifest_that_cannot_be_read_is_a_load_error(ship: Shipper, kind: str) -> None:
    app = ship(cpu=CPU)
    # A mark of the encoding is no error.
    file = ship.folder / "manifest.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert app.models() == ["a"]
    bad = BAD_TEXTS[kind]
    file.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    calls: list[Callable[[], Any]] = [
        app.models,
        lambda: app.load("a"),
        lambda: app.explain("a"),
        lambda: app.path("a").__enter__(),
    ]
    for call in calls:
        with pytest.raises(app.LoadError) as raised:
            call()
        assert f"{file} cannot be read" in str(raised.value)


def test_a_folder_without_a_manifest_is_a_load_error(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read") as raised:
            loader.load("a", package=folder)
        assert str(folder) in str(raised.value)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read"):
        loader.models(tmp_path)
    with pytest.raises(loader.LoadError, match=r"manifest\.json cannot be read"):
        loader.models()


V = ("components", "a", "variants", "cpu")

ORT = (*V, "executor_info", "ort")

OURS = ("additional_metadata", METADATA)

# Where: the keys down to the value that is replaced; the value; what the message has.
BAD_VALUES: list[tuple[tuple[str, ...], Any, str]] = [
    (("components",), [], "components must be"),
    (("components", "a"), 5, "variants must be"),
    (("components", "a", "variants"), [], "variants must be"),
    (V, [], "executor_info must be"),
    (V, None, "executor_info must be"),
    ((*V, "variant_directory"), 5, "variant_directory must be"),
    *(
        ((*V, "variant_directory"), outside, OUTSIDE)
        for outside in ("", "..", "a/../../b", "/tmp", "C:\\x", "..\\x", "\\\\server\\share")
    ),
    # Other spellings of names that `verify` compares.
    *(((*V, "variant_directory"), each, OUTSIDE) for each in (".", "a/cpu/", "a//cpu", "a\\cpu")),
    *(((*V, "variant_directory"), each, OUTSIDE) for each in ("./C:/x", "a/.. /x", "a\\...\\x")),
    ((*V, "ep"), 5, "ep must be"),
    ((*V, "device"), ["npu"], "device must be"),
    ((*V, "executor_info"), "x", "executor_info must be"),
    (ORT, 5, "ort must be"),
    (ORT, {}, "model_file must be"),
    ((*ORT, "model_file"), "../../x", OUTSIDE),
    ((*ORT, "model_file"), "/etc/passwd", OUTSIDE),
    (OURS, 5, f"{METADATA} must be"),
    ((*OURS, "files"), [], "files must be"),
    ((*OURS, "files"), {"x": 5}, "size must be"),
    ((*OURS, "files"), {"x": {"size": "5", "sha256": ""}}, "size must be"),
    ((*OURS, "files"), {"x": {"size": True, "sha256": ""}}, "size must be"),
    ((*OURS, "files"), {"x": {"size": 5}}, "sha256 must be"),
    ((*OURS, "files"), {"a/cpu/../../x": {"size": 5, "sha256": ""}}, OUTSIDE),
    (("components", "a", *OURS), "x", f"{METADATA} must be"),
    (("components", "a", *OURS, "model"), ["a"], "model must be"),
    ((*V, *OURS), [], f"{METADATA} must be"),
    ((*V, *OURS, "inputs"), {}, "inputs must be"),
    ((*V, *OURS, "inputs"), [5], "name must be"),
    ((*V, *OURS, "inputs"), [{"name": "x"}], "shape must be"),
    ((*V, *OURS, "plugin"), "x", "plugin must be"),
    ((*V, *OURS, "prepared"), 5, "prepared must be"),
    ((*V, *OURS, "prepared"), "../../x", OUTSIDE),
    ((*V, *OURS, "settings"), 5, "settings must be"),
    ((*V, *OURS, "settings", "device"), 5, "device must be"),
]


def replaced(manifest: Any, where: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``manifest`` with ``new`` at the place ``where``."""
    if not where:
        return new
    result = copy.copy(manifest)
    old = manifest[where[0]] if isinstance(manifest, list) else manifest.get(where[0])
    result[where[0]] = replaced(old, where[1:], new)
    return result


def test_a_bad_value_in_the_manifest_is_a_load_error_that_names_its_key(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    for where, value_, named in BAD_VALUES:
        ship.manifest(replaced(manifest, where, value_))
        app._read.cache_clear()
        with pytest.raises(app.LoadError) as raised:
            app.load("a")
        assert named in str(raised.value), (where, value_)


def test_bad_options_in_the_manifest_are_a_failure_of_their_target(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    for where, value_, named in (
        ((*ORT, "session_options"), [], "session_options must be"),
        ((*ORT, "session_options"), {"x": 1}, "x must be"),
        ((*ORT, "provider_options"), {"x": None}, "x must be"),
        ((*V, *OURS, "load_options"), {"x": 1}, "x must be"),
        *(
            ((*V, *OURS, "load_options"), {"x": each}, "x must be a folder in {user-cache}")
            for each in ("{user-cache}/../x", "/tmp{user-cache}", "{user-cache}/a/../../../x")
        ),
    ):
        ship.manifest(replaced(manifest, where, value_))
        app._read.cache_clear()
        cpu, source = app.explain("a")
        assert (cpu.outcome, source.outcome) == ("failed", "opened")
        assert named in cpu.reason


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield where
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from places(item, (*where, key))


STRANGE: list[Any] = [
    None, True, -1, 2**70, 1e308, "", "x", "..", "\0", "a" * 5000, [], [None], {}, {"x": 1}, {"": {}},
]  # fmt: skip


@pytest.mark.slow
def test_no_other_exception_leaves_the_module_whatever_the_manifest_says(ship: Shipper) -> None:
    cpu = changed(
        CPU, load_options={"x": "{user-cache}/x"}, prepared="prepared/a.onnx",
        plugin={"module": "no_such_ep", "package": "x", "registration_name": "x"},
        group="g",
    )  # fmt: skip
    plain = changed(CPU, load_options={"x": "{user-cache}/x"})
    app = ship.write({"a": component({"plain": plain, "cpu": cpu, "source": SOURCE})})
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    calls: list[Callable[[], Any]] = [
        lambda: app.load("a"),
        lambda: app.load("a", recompile=True, target="cpu"),
        lambda: app.load("a", shapes={"x": (1, 1, 8, 8)}, device="any", verify=True),
        app.models,
    ]
    # Each place gets three of the values, a number or none, a text and a container: all take long.
    cases = [
        (where, strange)
        for number, where in enumerate(places(manifest))
        for strange in STRANGE[number % 5 :: 5]
    ]
    for where, strange in cases:
        ship.manifest(sealed(json.dumps(replaced(manifest, where, strange))))
        # The size of the manifest may be the same, and its time too.
        app._read.cache_clear()
        for call in calls:
            with contextlib.suppress(app.LoadError):
                call()
        with contextlib.suppress(app.LoadError), app.path("a"):
            pass

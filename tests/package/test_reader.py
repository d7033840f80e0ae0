from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest

from hatch_epcontext.errors import InspectionError, Kind
from hatch_epcontext.package.manifest import Component, ModelPackage, OrtInfo, Variant, write
from hatch_epcontext.package.reader import ArchiveFiles, read
from tests.conftest import REPOSITORY, printed_json
from tests.package.foreign import (
    ASSET,
    ASSET_FOLDER,
    CPU,
    DET,
    MODEL,
    ORT,
    Edit,
    drop,
    manifest,
    put,
    reading,
    save,
)

WEIGHTS = "session.model_external_initializers_file_folder_path"
IN_COMPONENT = '{"variants": {"cpu": {"variant_directory": "cpu"}}}'
INSTALLED = put("", layout="installed")
NEWER = put("", schema_version="1.7")

Raw = Callable[[str], bytes]


class Case(NamedTuple):
    """A manifest, and who takes it.

    ``place``: the only one that we report; None if we read the package. ``opens``: whether ONNX
    Runtime opens it. ``files``: more files; ``raw`` makes the bytes of the manifest from its JSON.
    """

    name: str
    place: str | None
    opens: bool
    edits: tuple[Edit, ...] = ()
    files: Mapping[str, str] = {}
    raw: Raw = str.encode

    def save(self, folder: Path) -> Path:
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return save(folder, self.raw(json.dumps(manifest(*self.edits))))


def taken(
    name: str, *edits: Edit, files: Mapping[str, str] | None = None, raw: Raw = str.encode
) -> Case:
    return Case(name, None, True, edits, files or {}, raw)


def refused(name: str, place: str, *edits: Edit, files: Mapping[str, str] | None = None) -> Case:
    return Case(name, place, False, edits, files or {})


def no_json(name: str, raw: Raw) -> Case:
    return Case(name, "", False, (), {}, raw)


def differs(name: str, place: str | None, *edits: Edit) -> Case:
    """Refused by only one of the two."""
    return Case(name, place, place is not None, edits)


def named(component: str, variant: str) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        (body,) = content["components"]["det"]["variants"].values()
        content["components"] = {component: {"variants": {variant: body}}}

    return edit


def without_folder(name: str) -> tuple[Edit, Edit]:
    """The variant is called ``name``, and its folder is not named."""
    return drop(CPU, "variant_directory"), named("det", name)


def at_variant(name: str) -> str:
    return f"{DET}.variants.{name}"


def nested(levels: int) -> Any:
    value: Any = "innermost"
    for _ in range(levels):
        value = {"x": value}
    return value


def option(name: str, value: Any = "1") -> Edit:
    return put(ORT, session_options={name: value})


def at_option(name: str) -> str:
    return f'{ORT}.session_options."{name}"' if "." in name else f"{ORT}.session_options.{name}"


def model(path: str) -> Edit:
    return put(ORT, model_file=path)


def directory(path: str) -> Edit:
    return put(CPU, variant_directory=path)


def with_number(number: str) -> Raw:
    return lambda text: text.replace('"1.0"', number).encode()


ANY: list[Any] = [None, [], "x", 1.5, 2**70, nested(100)]
UNKNOWN_VERSIONS: list[Any] = ["2.0", 2, "0.9", 1.0, "1.0.0", "", "v1", True, []]
NO_INFO: list[Any] = [None, [], 1]
NO_STRINGS: list[Any] = [1, True, None, {}]

TAKEN_BY_BOTH = [
    taken("as it is"),
    *(taken(f"version {v!r}", put("", schema_version=v)) for v in ("1.0", "1", 1, "1.7")),
    taken("no layout", drop("", "layout")),
    *(
        taken(f"names {name[:20]!r}", named(name, name))
        for name in ("det.1x3x320x320", "a/b", "..", "", "a b", "模型", "C:", "\n", "x" * 300)
    ),
    *(taken(f"folder {path!r}", directory(path)) for path in (".", "./det/cpu", "det/cpu/")),
    taken("a folder as the name", *without_folder("det")),
    taken("no folder as the name", *without_folder("other")),
    taken("model in a folder", model("sub/det.onnx")),
    taken("missing model", model("other.onnx")),
    taken("more keys for ort", put(ORT, other=[1])),
    taken("ort's file", put(CPU, executor_info={"ort": "x.json"}),
          files={"det/cpu/x.json": '{"model_file": "det.onnx", "other": 1}'}),
    taken("another program", put(f"{CPU}.executor_info", other={"a": 1})),
    taken("only another program", put(CPU, executor_info={"other": {}})),
    taken("no executor", drop(CPU, "executor_info")),
    taken("optional keys", put("", package_name="", package_version="1", description="d"),
          put(DET, component_name="Detector!")),
    taken("no variants", put(DET, variants={})),
    taken("no EP", drop(CPU, "ep")),
    *(
        taken(f"metadata {value!r:.20}", *(put(p, additional_metadata=value) for p in ("", DET, CPU)))
        for value in ANY
    ),
    taken("newer keys", NEWER, put("", x=1), put(DET, x=1), put(CPU, x=1, device="tpu")),
    taken("unknown option", option("some.option")),
    taken("asset", model(f"{ASSET}/det.onnx"), files={f"{ASSET_FOLDER}/det.onnx": ""}),
    taken("whole asset", model(ASSET), files={f"{ASSET_FOLDER}/det.onnx": ""}),
    taken("asset elsewhere", put("", shared_assets={ASSET: "det"}), model(f"{ASSET}/det.onnx")),
    taken("missing asset", put("", shared_assets={ASSET: "none"}), model(f"{ASSET}/det.onnx")),
    taken("no assets", put("", shared_assets={})),
    taken("weights", option(WEIGHTS, ".")),
    taken("weights in an asset", option(WEIGHTS, ASSET), files={f"{ASSET_FOLDER}/w": ""}),
    taken("installed", INSTALLED, directory("../p/det/cpu"), model("../cpu/det.onnx")),
    taken("component's folder", put("components", det="det"),
          files={"det/component.json": IN_COMPONENT}),
    taken("component's file", put("components", det="det/x"), files={"det/x": IN_COMPONENT}),
    taken("BOM", raw=lambda text: b"\xef\xbb\xbf" + text.encode()),
    taken("a key twice", raw=lambda text: text[:-1].encode() + b', "layout": "portable"}'),
]  # fmt: skip

REFUSED_BY_BOTH = [
    refused("unknown key", "producer", put("", producer="x")),
    refused("$schema", '"$schema"', put("", **{"$schema": "x"})),
    refused("unknown key of a component", f"{DET}.x", put(DET, x=1)),
    refused("unknown key of a variant", f"{CPU}.x", put(CPU, x=1)),
    *(
        refused(f"null {key}", key, put("", **{key: None}))
        for key in ("schema_version", "layout", "components", "shared_assets", "package_name",
                    "package_version", "description")
    ),
    refused("null component", DET, put("components", det=None)),
    refused("null variant", CPU, put(f"{DET}.variants", cpu=None)),
    *(refused(f"null {key}", f"{DET}.{key}", put(DET, **{key: None}))
      for key in ("variants", "component_name")),
    *(
        refused(f"null {key}", f"{CPU}.{key}", put(CPU, **{key: None}))
        for key in ("variant_directory", "ep", "device", "compatibility_string", "executor_info")
    ),
    *(refused(f"null {key}", f"{ORT}.{key}", put(ORT, **{key: None}))
      for key in ("model_file", "session_options", "provider_options")),
    *(refused(f"{value} for ort", ORT, put(CPU, executor_info={"ort": value}))
      for value in NO_INFO),
    refused("list for another program", f"{CPU}.executor_info.x", put(CPU, executor_info={"x": []})),
    *(
        refused(f"version {v!r}", "schema_version", put("", schema_version=v))
        for v in UNKNOWN_VERSIONS
    ),
    refused("no version", "schema_version", drop("", "schema_version")),
    refused("layout", "layout", put("", layout="flat")),
    refused("no components", "components", drop("", "components")),
    refused("list of components", "components", put("", components=["det"])),
    refused("number for a component", DET, put("components", det=1)),
    refused("component without variants", f"{DET}.variants", drop(DET, "variants")),
    *(
        refused(f"folder {path[:20]!r}", f"{CPU}.variant_directory", directory(path))
        for path in ("none", "", "..", "det/../det/cpu", "/det/cpu", "//host/det", "C:/det/cpu",
                     "C:det", "\\det", "det\\..\\cpu", "x" * 300)
    ),
    *(refused(f"model {path!r}", f"{ORT}.model_file", model(path))
      for path in ("", "../cpu/det.onnx", "/det.onnx")),
    *(
        refused(f"{name!r} without a folder", at_variant(f'"{name}"'), *without_folder(name))
        for name in ("", "..", "/a")
    ),
    *(refused(f"installed in {path!r}", f"{CPU}.variant_directory", INSTALLED, directory(path))
      for path in ("", "../none", "/no/such/folder")),
    *(
        refused(f"component {path[:20]!r}", DET, put("components", det=path))
        for path in ("none", "det", "../det", "/det", "", "x" * 5000)
    ),
    *(
        refused(f"component's file {text!r}", DET, put("components", det="x.json"),
                files={"x.json": text})
        for text in ("", "null", "[]", "{")
    ),
    refused("folder in a component's file", f"{CPU}.variant_directory",
            put("components", det="x/y.json"), files={"x/y.json": IN_COMPONENT}),
    *(
        refused(f"file {path!r} for {key}", f"{CPU}.executor_info.{key}",
                put(CPU, executor_info={key: path}))
        for path in ("none.json", "../cpu/none.json", "", "a\0b")
        for key in ("ort", "other")
    ),
    refused("file of another program", f"{CPU}.executor_info.x",
            put(CPU, executor_info={"x": "x.json"}), files={"det/cpu/x.json": "{"}),
    refused("ort's file is null", ORT, put(CPU, executor_info={"ort": "x.json"}),
            files={"det/cpu/x.json": "null"}),
    *(refused(f"option {value}", at_option("a"), option("a", value))
      for value in NO_STRINGS),
    refused("list of options", f"{ORT}.provider_options", put(ORT, provider_options=[])),
    *(
        refused(name, at_option(name), option(name))
        for name in ("session.optimized_model_filepath", "session.enable_profiling",
                     "session.debug_layout_transformation",
                     "session.collect_node_memory_stats_to_file")
    ),
    refused("weights outside", at_option(WEIGHTS), option(WEIGHTS, "../x")),
    refused("context outside", at_option("ep.context_file_path"), option("ep.context_file_path", "/x")),
    refused("weights in no asset", at_option(WEIGHTS), option(WEIGHTS, ASSET)),
    refused("no asset", f"{ORT}.model_file", model(f"{ASSET}/det.onnx")),
    *(
        refused(f"asset {rest!r}", f"{ORT}.model_file", layout, model(ASSET + rest),
                files={f"{ASSET_FOLDER}/x": ""})
        for rest in ("/../x", "//x")
        for layout in (INSTALLED, put("", layout="portable"))
    ),
    refused("asset outside", f'shared_assets."{ASSET}"', put("", shared_assets={ASSET: "../x"})),
    *(refused(f"asset called {name[70:]!r}", f'shared_assets."{name}"',
              put("", shared_assets={name: "det"}))
      for name in ("x:y", f"{ASSET}/x")),
    no_json("null", lambda text: b"null"),
    no_json("list", lambda text: b"[]"),
    no_json("empty", lambda text: b""),
    no_json("cut", lambda text: text[:-1].encode()),
    no_json("comment", lambda text: b"// x\n" + text.encode()),
    no_json("latin-1", lambda text: text.replace("det", "d\xe9t").encode("latin-1")),
    no_json("UTF-16", lambda text: text.encode("utf-16")),
    no_json("half a character", lambda text: text.replace("det", "\\ud800").encode()),
    *(no_json(number, with_number(number)) for number in ("NaN", "Infinity", "-Infinity", "1e999")),
]  # fmt: skip

SEEN_DIFFERENTLY = [
    # ONNX Runtime opens these, and never selects a variant, or fails to create a session.
    differs("no component", "components", put("", components={})),
    *(differs(f"device {name!r}", f"{CPU}.device", put(CPU, device=name)) for name in ("", "NPU", "x")),
    differs("no model file", f"{ORT}.model_file", put(CPU, executor_info={"ort": {}})),
    *(
        differs(f"asset {path[60:]!r}", f"{ORT}.model_file", model(path))
        for path in ("sha256:", f"{ASSET}x", ASSET[:-1], f"{ASSET[:-6]}ABCDEF")
    ),
    # On Windows these would be outside of the package.
    *(differs(f"model {path!r}", f"{ORT}.model_file", model(path))
      for path in ("C:/det.onnx", "C:det.onnx", "\\det.onnx", "..\\det.onnx")),
    differs("'C:' without a folder", at_variant('"C:"'), *without_folder("C:")),
    # Python's recursion has a limit.
    differs("many levels", "", put("", additional_metadata=nested(200))),
]  # fmt: skip

CASES = [*TAKEN_BY_BOTH, *REFUSED_BY_BOTH, *SEEN_DIFFERENTLY]


def test_the_place_of_what_is_wrong_is_named(tmp_path: Path) -> None:
    wrong = {}
    for number, case in enumerate(CASES):
        package, problems = reading(case.save(tmp_path / str(number) / "p"))
        expected = [] if case.place is None else [f"package: {case.place}".removesuffix(": ")]
        if (
            [problem.location for problem in problems] != expected
            or not {problem.kind for problem in problems} <= {Kind.INVALID_PACKAGE}
            or (package is None) is not bool(problems)
        ):
            wrong[case.name] = problems
    assert wrong == {}


OPEN = """
import json, sys
sys.path.insert(0, "tests/integration")
import model_package_api as api
from pathlib import Path
answers = {}
try:
    with api.runtime() as ort:
        for folder in sorted(Path(sys.argv[1]).iterdir()):
            try:
                with ort.package(folder / "p"):
                    answers[folder.name] = None
            except api.OrtError as error:
                answers[folder.name] = str(error)
except api.UnavailableError as error:
    answers = str(error)
print(json.dumps(answers))
"""


def opened_by_onnxruntime(folder: Path) -> dict[str, str | None]:
    """For each folder in ``folder`` the error of ONNX Runtime, with the package ``p`` in it."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = printed_json(done.stdout)
    if isinstance(answers, str):
        pytest.skip(answers)
    return dict(answers)


@pytest.mark.skipif(sys.platform == "win32", reason="other paths are outside of the package there")
def test_onnxruntime_opens_what_the_cases_say(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        case.save(tmp_path / f"{number:03}" / "p")
    errors = opened_by_onnxruntime(tmp_path)
    assert len(errors) == len(CASES)
    wrong = {
        case.name: error
        for case, error in zip(CASES, errors.values(), strict=True)
        if case.opens == (error is not None)
    }
    assert not wrong


def test_a_link_to_a_file_outside_is_followed(tmp_path: Path) -> None:
    """ONNX Runtime refuses such a package. No archive contains links, so it is nobody's package."""
    folder = save(tmp_path / "all" / "package" / "p", manifest())
    outside = (folder / MODEL).rename(tmp_path / "det.onnx")
    try:
        (folder / MODEL).symlink_to(outside)
    except OSError:
        pytest.skip("this user may not make links")
    assert reading(folder)[1] == []
    assert opened_by_onnxruntime(tmp_path / "all")["package"] is not None


@pytest.mark.parametrize("file", ["part/component.json", "det/cpu/ort.json"])
def test_a_json_file_that_is_a_link_to_the_outside_is_not_read(tmp_path: Path, file: str) -> None:
    edit = (
        put("components", det="part")
        if "part" in file
        else put(CPU, executor_info={"ort": "ort.json"})
    )
    folder = save(tmp_path / "p", manifest(edit), [MODEL, file])
    (folder / file).rename(tmp_path / "secret.json")
    try:
        (folder / file).symlink_to(tmp_path / "secret.json")
    except OSError:
        pytest.skip("this user may not make links")
    _, problems = reading(folder)
    assert f"{file} is a link to a file outside of the package." in [p.message for p in problems]


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ((put("", schema_version="2.0"),), "is 2.0, and this version reads 1.0."),
        ((put("", schema_version=1.0),), 'must be a version such as "1.0", not 1.0.'),
        ((drop("", "components"),), "is missing."),
        ((put(DET, x=1),), "is not a known key. Known: variants, component_name,"),
        ((put(CPU, ep=None),), "must be a string, not null."),
        ((put(CPU, device="NPU"),), 'must be "cpu" or "gpu" or "npu", not "NPU".'),
        ((directory("none"),), "names the folder 'none', which is missing."),
        (
            (directory("C:\\x"),),
            r"names 'C:\\x', which is outside of the package, or not a relative",
        ),
        ((put("components", det="det"),), "det/component.json cannot be read: No such file"),
        (
            (put(CPU, executor_info={"ort": MODEL}),),
            f"det/cpu/{MODEL} cannot be read: No such file",
        ),
        ((model(f"{ASSET}/x"),), f"names a shared asset, and {ASSET_FOLDER!r} is missing."),
        (
            (model(f"{ASSET}x"),),
            "must be a path, or begin with sha256: and 64 lower-case hex digits.",
        ),
        ((option("session.enable_profiling"),), "names an output file, which ONNX Runtime refuses"),
        ((put("", additional_metadata=nested(200)),), "it is nested more than 150 levels deep."),
        ((put("", layout=nested(140)),), 'must be "portable" or "installed", not { x = { x = {'),
    ],
)
def test_the_message_says_what_is_wrong(
    edits: tuple[Edit, ...], message: str, tmp_path: Path
) -> None:
    _, (problem,) = reading(save(tmp_path, manifest(*edits)))
    assert message in problem.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "manifest.json is not JSON: Expecting property name"),
        (b'{"a": NaN}', "manifest.json is not JSON: NaN is not a number in JSON."),
        (b'{"a": 1e999}', "manifest.json is not JSON: a number in it is too large."),
        (b"\xff", "manifest.json is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'["\\udfff"]', "manifest.json is not JSON: 'utf-8' codec can't encode character"),
        (b"[" * 100_000, "manifest.json is not JSON: "),
        (
            b"[" * 160 + b"]" * 160,
            "manifest.json is not JSON: it is nested more than 150 levels deep.",
        ),
        (b"null", "must be a table, not null."),
    ],
)
def test_a_manifest_that_is_no_json_is_not_read(
    content: bytes, message: str, tmp_path: Path
) -> None:
    package, (problem,) = reading(save(tmp_path, content))
    assert package is None
    assert problem.location == "package"
    assert problem.message.startswith(message)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    other = {"variants": {"cpu": {"variant_directory": "none"}, "npu": {"device": "tpu"}}}
    folder = save(tmp_path, manifest(put("components", other=other), put(CPU, x=1, y=2)))
    package, problems = reading(folder)
    assert [problem.location for problem in problems] == [
        f"package: {CPU}.x",
        f"package: {CPU}.y",
        "package: components.other.variants.cpu.variant_directory",
        "package: components.other.variants.npu.device",
    ]
    assert package is None


def test_a_folder_without_a_manifest_is_one_problem(tmp_path: Path) -> None:
    package, (problem,) = reading(tmp_path)
    assert package is None
    assert problem.message == "manifest.json cannot be read: No such file or directory."


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_the_place_of_a_manifest_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    _, (problem,) = reading(tmp_path)
    assert "there is no regular file" in problem.message


def the_variant(folder: Path) -> Variant:
    """The only variant of the package, which has no problems."""
    package, problems = reading(folder)
    assert problems == []
    assert package is not None
    (component,) = package.components.values()
    (variant,) = component.variants.values()
    return variant


def test_everything_in_a_manifest_is_read(tmp_path: Path) -> None:
    info = {
        "model_file": "sub/det.onnx",
        "session_options": {"a": "1"},
        "provider_options": {"b": "2"},
    }
    npu = {
        "variant_directory": "npu",
        "ep": "SomeEP",
        "device": "npu",
        "compatibility_string": "v1",
        "executor_info": {"ort": info},
        "additional_metadata": ["any"],
    }
    content = manifest(
        put(f"{DET}.variants", npu=npu),
        put(DET, additional_metadata={"of": "it"}),
        put("", additional_metadata="text", schema_version="1.7", layout="installed"),
    )
    package, problems = reading(save(tmp_path, content, [MODEL, "npu/sub/det.onnx"]))
    assert problems == []
    variants = {
        "cpu": Variant(
            directory="det/cpu", ep="CPUExecutionProvider", ort=OrtInfo(model_file="det.onnx")
        ),
        "npu": Variant(
            directory="npu",
            ep="SomeEP",
            device="npu",
            compatibility_string="v1",
            ort=OrtInfo(
                model_file="sub/det.onnx", session_options={"a": "1"}, provider_options={"b": "2"}
            ),
            metadata=["any"],
        ),
    }
    assert package == ModelPackage(
        {"det": Component(variants, {"of": "it"})}, "installed", "text", "1.7"
    )
    assert variants["npu"].model_file == "npu/sub/det.onnx"


def test_the_variants_keep_their_order(tmp_path: Path) -> None:
    content = manifest()
    variants = content["components"]["det"]["variants"]
    for name in ("z", "a", "m"):
        variants[name] = variants["cpu"]
    package, _ = reading(save(tmp_path, content))
    assert package is not None
    assert list(package.components["det"].variants) == ["cpu", "z", "a", "m"]


@pytest.mark.parametrize("file", ["x/component.json", "x/det.json", "x/det"])
def test_a_component_may_have_a_file_of_its_own(file: str, tmp_path: Path) -> None:
    content = manifest()
    body = content["components"]["det"]
    body["variants"]["cpu"]["variant_directory"] = "y"
    content["components"]["det"] = file.removesuffix("/component.json")
    save(tmp_path, content, ["x/y/det.onnx"])
    (tmp_path / file).write_text(json.dumps(body), encoding="utf-8")
    variant = the_variant(tmp_path)
    assert (variant.directory, variant.model_file) == ("x/y", "x/y/det.onnx")


def test_a_component_in_a_folder_as_olive_writes_it(tmp_path: Path) -> None:
    """Its variant has neither a folder nor a model file of its own."""
    body = {"component_name": "decoder", "variants": {"cpu_x64": {"ep": "CPUExecutionProvider"}}}
    content = {"schema_version": "1.0", "components": {"decoder": "models/decoder"}}
    save(tmp_path, content, ["models/decoder/cpu_x64/model.onnx"])
    file = tmp_path / "models" / "decoder" / "component.json"
    file.write_text(json.dumps(body), encoding="utf-8")
    variant = the_variant(tmp_path)
    assert variant == Variant(directory="models/decoder/cpu_x64", ep="CPUExecutionProvider")
    assert variant.model_file is None


def test_what_onnxruntime_opens_may_be_in_a_file(tmp_path: Path) -> None:
    save(tmp_path, manifest(put(CPU, executor_info={"ort": "sub/ort.json"})))
    info = {"model_file": "det.onnx", "session_options": {"a": "b"}, "newer": 1}
    (tmp_path / "det" / "cpu" / "sub").mkdir()
    (tmp_path / "det" / "cpu" / "sub" / "ort.json").write_text(json.dumps(info), encoding="utf-8")
    variant = the_variant(tmp_path)
    assert variant.ort == OrtInfo(model_file="det.onnx", session_options={"a": "b"})
    # Not relative to the file that names it.
    assert variant.model_file == MODEL


@pytest.mark.parametrize(
    ("path", "assets", "found"),
    [
        (f"{ASSET}/sub/det.onnx", {}, f"{ASSET_FOLDER}/sub/det.onnx"),
        (ASSET, {}, ASSET_FOLDER),
        (f"{ASSET}/det.onnx", {ASSET: "det/cpu"}, MODEL),
        (ASSET, {ASSET: "det/cpu"}, "det/cpu"),
    ],
)
def test_a_model_may_be_a_shared_asset(
    path: str, assets: dict[str, str], found: str, tmp_path: Path
) -> None:
    content = manifest(model(path), put("", shared_assets=assets))
    variant = the_variant(save(tmp_path, content, [MODEL, f"{ASSET_FOLDER}/sub/det.onnx"]))
    assert variant.model_file == found


def test_an_installed_package_may_name_files_anywhere(tmp_path: Path) -> None:
    outside = tmp_path / "models"
    outside.mkdir()
    folder = tmp_path / "package"
    edits = INSTALLED, directory("../models"), model("sub/../a.onnx")
    variant = the_variant(save(folder, manifest(*edits), []))
    assert variant.directory == "../models"
    assert (folder / str(variant.model_file)).parent.resolve() == (outside / "sub").parent.resolve()
    edits = INSTALLED, directory("."), model((outside / "a.onnx").as_posix())
    variant = the_variant(save(folder, manifest(*edits), []))
    assert folder / str(variant.model_file) == outside / "a.onnx"


@pytest.mark.parametrize("folder", ["", "my_app/epcontext"])
def test_a_package_in_an_archive_is_the_same(folder: str, tmp_path: Path) -> None:
    package = save(tmp_path / folder, manifest(put("components", det="det")))
    (package / "det" / "component.json").write_text(IN_COMPONENT, encoding="utf-8")
    path = tmp_path / "my_app-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in (package / "manifest.json", package / MODEL, package / "det/component.json"):
            archive.write(file, file.relative_to(tmp_path))
    with zipfile.ZipFile(path) as archive:
        found = read(ArchiveFiles(archive, PurePosixPath(folder)), "package")
    assert found == reading(package)[0]


def test_an_archive_says_what_is_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("p/manifest.json", json.dumps(manifest()))
        archive.writestr("q/manifest.json", json.dumps(manifest(directory("."))))
    data = path.read_bytes().replace(b'"variant_directory": "."', b'"variant_directory": "x"')
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        messages = []
        for folder in ("p", "q", "r"):
            with pytest.raises(InspectionError) as raised:
                read(ArchiveFiles(archive, PurePosixPath(folder)), "package")
            messages += [problem.message for problem in raised.value.problems]
    assert messages == [
        "names the folder 'det/cpu', which is missing.",
        "manifest.json cannot be read: it is damaged (Bad CRC-32 for file 'q/manifest.json').",
        "manifest.json cannot be read: it is missing.",
    ]


def made(metadata: Any = None, **variants: Variant) -> ModelPackage:
    return ModelPackage({"det": Component(variants)}, metadata=metadata)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    package = made(
        {"of": ["the", None, {"package": None}]},
        z=Variant(
            directory="z",
            ep="SomeEP",
            device="gpu",
            compatibility_string="v1",
            ort=OrtInfo(
                model_file="a.onnx", session_options={"b": "1"}, provider_options={"a": "2"}
            ),
            metadata={"a": None},
        ),
        a=Variant(directory="a", ep=None),
    )
    save(tmp_path, write(package).encode(), ["z/a.onnx", "a/b"])
    assert reading(tmp_path) == (package, [])


def test_the_order_of_the_variants_is_written() -> None:
    names = ["x-elite", "cpu", "a", "source"]
    package = made(**{name: Variant(directory=name, ep="SomeEP") for name in names})
    assert list(json.loads(write(package))["components"]["det"]["variants"]) == names


def test_keys_without_a_value_are_not_written() -> None:
    package = made(cpu=Variant(directory="det/cpu", ep=None))
    assert json.loads(write(package)) == {
        "schema_version": "1.0",
        "layout": "portable",
        "components": {"det": {"variants": {"cpu": {"variant_directory": "det/cpu"}}}},
    }


def test_any_parser_reads_what_is_written(tmp_path: Path) -> None:
    metadata = {
        "numbers": [float("inf"), -float("inf"), 1.5],
        "half \ud800": ["\udfff", {"\ud800": "模型"}],
        "tuple": (1, 2),
    }
    folder = tmp_path / "all" / "package" / "p"
    text = write(made(metadata, cpu=Variant(directory="det/cpu", ep=None)))
    assert text.isascii()
    package, problems = reading(save(folder, text.encode()))
    assert problems == []
    assert package is not None
    largest = sys.float_info.max
    assert package.metadata == {
        "numbers": [largest, -largest, 1.5],
        "half \\ud800": ["\\udfff", {"\\ud800": "模型"}],
        "tuple": [1, 2],
    }
    assert opened_by_onnxruntime(tmp_path / "all") == {"package": None}

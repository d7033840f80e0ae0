"""Compiling on the user's machine, with the real onnxruntime."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest

from hatch_epcontext import _recompile
from tests.conftest import needs_qnn
from tests.loader.shipped import (
    CPU,
    NPU,
    OPENVINO_EP,
    QNN,
    QNN_EP,
    Shipper,
    Table,
    X,
    changed,
    damage,
    device,
    opener,
    outcomes,
)
from tests.models import parsed, save


def test_without_a_prepared_model_nothing_can_be_compiled(ship: Shipper) -> None:
    app = ship(npu=NPU, cpu=CPU)
    with pytest.raises(app.LoadError, match="recompile = true"):
        app.load("a", fallback="jit")
    # As in an editable install.
    app = ship()
    assert app.target_of(app.load("a", fallback="jit")) == "source"


def kept(app: Any) -> list[Path]:
    """The folders of the contexts that were compiled on this machine."""
    folder = app.user_folder() / "compiled"
    return sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def jit(app: Any, **arguments: Any) -> Any:
    session = app.load("a", device="any", fallback="jit", **arguments)
    assert session.run(None, X)[0].shape == (1, 10)
    return session


@pytest.fixture
def broken(qnn: Shipper) -> Any:
    """An app whose context QNN refuses."""
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    return app


@needs_qnn
def test_a_target_is_compiled_before_the_next_one_is_opened(qnn: Shipper) -> None:
    app = qnn(npu=QNN, cpu=CPU)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    assert app.target_of(app.load("a", device="any")) == "cpu"
    assert app.target_of(jit(app)) == "npu"
    steps = app.explain("a", device="any", fallback="jit")
    assert outcomes(steps) == [
        ("npu", "failed"),
        ("npu", "opened"),
        ("cpu", "not tried"),
        ("source", "not tried"),
    ]


@needs_qnn
def test_options_that_name_files_have_those_of_the_package(qnn: Shipper) -> None:
    own = QNN["additional_metadata"]["hatch-epcontext"]["settings"]["provider_options"]
    shipped, missing = f"{'a' * 32}/x.so", f"{'b' * 32}/y.so"
    options = {
        **own,
        "op_affinity": '{file}{"op_type":{"Relu":"htp"}}',
        "shipped": f"{{file}}/{shipped}",
        "json_qnn_graph_dir": "{file}/json_qnn_graph_dir",
    }
    app = qnn(npu=changed(QNN, settings={"provider_options": options}))
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    file = qnn.folder / "a" / "npu" / "files" / shipped
    file.parent.mkdir(parents=True)
    file.write_bytes(b"library")
    assert app.target_of(jit(app, target="npu")) == "npu"
    options["elsewhere"] = f"{{file}}/{missing}"
    app = qnn(npu=changed(QNN, settings={"provider_options": options}))
    with pytest.raises(app.LoadError, match=r"only the app can give: .*'elsewhere'"):
        jit(app, target="npu")
    assert app.target_of(jit(app, target="npu", provider_options={"elsewhere": "z"})) == "npu"


@needs_qnn
def test_a_prepared_model_that_was_changed_is_not_compiled(broken: Any, qnn: Shipper) -> None:
    (prepared,) = (qnn.folder / "a/npu/prepared").glob("*.onnx")
    content = bytearray(prepared.read_bytes())
    content[-1] ^= 1
    prepared.write_bytes(content)
    with pytest.raises(
        broken.LoadError, match=r"compiling it on this machine: .*prepared/a\.onnx was changed"
    ):
        jit(broken, target="npu")
    assert kept(broken) == []


@needs_qnn
def test_a_context_that_opens_is_not_compiled_again(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    assert app.target_of(jit(app)) == "npu"
    assert outcomes(app.explain("a", device="any", fallback="jit")) == [
        ("npu", "opened"),
        ("source", "not tried"),
    ]
    assert kept(app) == []


def test_on_a_machine_without_the_device_nothing_is_compiled(ship: Shipper) -> None:
    app = ship(npu=changed(NPU, prepared="prepared/a.onnx"))
    steps = app.explain("a", fallback="jit")
    assert outcomes(steps) == [("npu", "skipped"), ("source", "opened")]
    assert kept(app) == []


@needs_qnn
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a_ctx.onnx", "truncated"),
        ("a_ctx_qnn.bin", "altered"),
        ("a_ctx_qnn.bin", "missing"),
        # The source opens only when it is compiled, which is forbidden.
        ("a_ctx.onnx", "not compiled"),
    ],
)
def test_a_context_that_does_not_open_is_compiled_once(
    qnn: Shipper, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    if how == "not compiled":
        shutil.copyfile(qnn.folder / "a/npu/prepared/a.onnx", qnn.folder / "a/npu/a_ctx.onnx")
        app = qnn(npu=QNN)
    else:
        app = qnn(npu=QNN)
        damage(qnn.folder / f"a/npu/{name}", how)
    first = jit(app)
    assert app.target_of(first) == "npu"
    assert first.get_providers()[0] == QNN_EP
    assert "a on npu: failed" in caplog.text
    assert caplog.text.count("a is compiled for npu on this machine") == 1
    (folder,) = kept(app)
    assert (folder / "a_ctx.onnx").is_file()
    assert onnx.load(folder / "a_ctx.onnx").graph.node[0].op_type == "EPContext"
    written = (folder / "a_ctx.onnx").stat().st_mtime_ns
    caplog.clear()
    steps = app.explain("a", device="any", fallback="jit")
    assert outcomes(steps) == [("npu", "failed"), ("npu", "opened"), ("source", "not tried")]
    assert steps[1].reason == f"{QNN_EP} on cpu, compiled on this machine"
    jit(app)
    assert "is compiled" not in caplog.text
    assert kept(app) == [folder]
    assert (folder / "a_ctx.onnx").stat().st_mtime_ns == written


@pytest.mark.parametrize("how", ["of another version", "missing", "truncated"])
def test_openvino_compiles_again_what_does_not_fit_any_more(
    openvino: tuple[Shipper, Table], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ship, entry = openvino
    if how == "of another version":
        entry["compatibility_string"] = how
    app = ship(openvino=entry)
    if how != "of another version":
        (sidecar,) = (ship.folder / "a/openvino").glob("*.bin")
        damage(sidecar, how)
    for _ in range(2):
        first, second, source = app.explain("a", fallback="jit")
        assert first.outcome == ("skipped" if how == "of another version" else "failed")
        assert str(second) == f"openvino: opened, {OPENVINO_EP} on cpu, compiled on this machine"
        assert source.outcome == "not tried"
    assert app.load("a", fallback="jit").run(None, X)[0].shape == (1, 10)
    assert caplog.text.count("a is compiled for openvino on this machine") == 1


@needs_qnn
def test_the_prepared_model_matters_only_where_it_is_compiled(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/prepared/a.onnx", "truncated")
    assert app.target_of(app.load("a", device="any", verify=True)) == "npu"


@needs_qnn
@pytest.mark.parametrize(
    ("file", "how", "arguments"),
    [
        ("a_ctx_qnn.bin", "truncated", {}),
        ("a_ctx_qnn.bin", "altered", {}),
        ("a_ctx_qnn.bin", "altered", {"verify": True}),
        ("a_ctx.onnx", "missing", {}),
        ("files.json", "truncated", {}),
        ("files.json", "altered", {}),
    ],
)
def test_a_damaged_context_of_this_machine_is_compiled_again(
    broken: Any, caplog: pytest.LogCaptureFixture, file: str, how: str, arguments: Table
) -> None:
    jit(broken)
    (folder,) = kept(broken)
    damage(folder / file, how)
    caplog.clear()
    assert broken.target_of(jit(broken, **arguments)) == "npu"
    assert "cannot be opened any more" in caplog.text
    assert caplog.text.count("is compiled for npu") == 1
    assert kept(broken) == [folder]
    caplog.clear()
    jit(broken, verify=True)
    assert "is compiled" not in caplog.text


@needs_qnn
def test_an_altered_context_of_this_machine_is_found_on_request(
    broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    jit(broken)
    (folder,) = kept(broken)
    record = json.loads((folder / "files.json").read_text("utf-8"))
    assert record.keys() == {"a_ctx.onnx", "a_ctx_qnn.bin"}
    record["a_ctx_qnn.bin"]["sha256"] = "of other bytes"
    (folder / "files.json").write_text(json.dumps(record), encoding="utf-8")
    caplog.clear()
    jit(broken)
    assert "is compiled for npu" not in caplog.text
    jit(broken, verify=True)
    assert "a_ctx_qnn.bin was changed" in caplog.text
    assert caplog.text.count("is compiled for npu") == 1


AT_ONCE = """
import json, logging, sys, time
from pathlib import Path
logging.basicConfig(stream=sys.stderr, format="%(message)s")
import onnxruntime_qnn
from shipped import explain
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
records = []
logging.getLogger("shipped").addHandler(
    type("Handler", (logging.Handler,), {"emit": lambda self, record: records.append(record.msg)})()
)
steps = explain("a", device="any", fallback="jit")
print(json.dumps([[str(each) for each in steps], sum("is compiled" in each for each in records)]))
"""


@needs_qnn
def test_a_changed_manifest_is_found_on_request_also_where_it_was_compiled(
    broken: Any, qnn: Shipper
) -> None:
    jit(broken)
    manifest = qnn.folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"basic"', b'"BASIC"'))
    steps = broken.explain("a", device="any", fallback="jit", verify=True)
    assert {step.outcome for step in steps} == {"failed"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    import fcntl

    reads, writes = os.pipe()
    with _recompile._locked(tmp_path / "lock"):
        if (child := os.fork()) == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    try:
        with (tmp_path / "lock").open("ab") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        os.close(reads)


@needs_qnn
def test_of_two_processes_one_compiles(qnn: Shipper, broken: Any, tmp_path: Path) -> None:
    ready = [tmp_path / f"ready{index}" for index in range(2)]
    go = tmp_path / "go"
    processes = [qnn.start(AT_ONCE, str(each), str(go)) for each in ready]
    while not all(each.exists() for each in ready):
        assert all(each.poll() is None for each in processes)
        time.sleep(0.01)
    go.touch()
    results = [qnn.finish(each) for each in processes]
    for (first, second, _), _ in results:
        assert first.startswith("npu: failed")
        assert second == f"npu: opened, {QNN_EP} on cpu, compiled on this machine"
    assert sorted(compiled for _, compiled in results) == [0, 1]
    assert len(kept(broken)) == 1


@needs_qnn
def test_of_several_threads_one_compiles(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(lambda _: jit(broken), range(4)))
    assert {broken.target_of(each) for each in sessions} == {"npu"}
    assert caplog.text.count("is compiled for npu") == 1


@needs_qnn
def test_a_prepared_model_that_cannot_be_compiled_is_a_failure(
    qnn: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    damage(qnn.folder / "a/npu/prepared/a.onnx")
    steps = app.explain("a", device="any", fallback="jit")
    assert outcomes(steps) == [("npu", "failed"), ("npu", "failed"), ("source", "opened")]
    assert kept(app) == []
    damage(qnn.folder / "a/npu/prepared/a.onnx", "truncated")
    steps = app.explain("a", device="any", fallback="jit")
    assert "a/npu/prepared/a.onnx has" in steps[1].reason
    # Nothing is left over but the lock.
    (lock,) = (app.user_folder() / "compiled").iterdir()
    assert lock.suffix == ".lock"


@needs_qnn
def test_a_model_of_which_the_ep_compiles_nothing_is_a_failure(qnn: Shipper) -> None:
    (prepared,) = (qnn.folder / "a/npu/prepared").iterdir()
    made = parsed("(float[2, 4] x) => (int64[2, ?] y) { y = NonZero (x) }")
    save(made, prepared)
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    steps = app.explain("a", device="any", fallback="jit")
    assert steps[1].outcome == "failed"
    assert "Unable to compile any nodes" in steps[1].reason
    assert kept(app) == []


@needs_qnn
def test_settings_decide_how_and_whether_a_model_is_compiled_again(qnn: Shipper) -> None:
    app = qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    jit(app)
    session_options = {"session.some": "1"}
    for settings in (
        {"embed": True, "session_options": session_options},
        {"optimization": "all", "embed": True},
        {"optimization": None, "session_options": None, "device_filter": None},
    ):
        app = qnn(npu=changed(QNN, settings=settings))
        damage(qnn.folder / "a/npu/a_ctx_qnn.bin", "truncated")
        jit(app)
    assert len(kept(app)) == 4
    embedded = [each for each in kept(app) if not (each / "a_ctx_qnn.bin").exists()]
    assert len(embedded) == 2


@needs_qnn
def test_another_version_or_device_needs_another_context(
    broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = opener(broken)

    def key(each: Any = None) -> str:
        own.find_devices = lambda: [each or device("NPU", driver="1")]
        return str(_recompile._key_of_compiled(own, own.variant))

    keys = {key(), key(device("NPU", driver="2")), key(device("NPU", "Other", driver="1"))}
    other = device("NPU", driver="1")
    other.device.device_id = 3
    keys.add(key(other))
    monkeypatch.setattr(onnxruntime, "__version__", "99.0")
    keys.add(key())
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    keys.add(key())
    # The same vendor has another name.
    assert len(keys) == 5
    # Windows may say that otherwise when it starts again, and a path is not a version.
    moved = device("NPU", driver="1", library_path="/elsewhere")
    moved.device.metadata = {"LUID": "5", "DxgiAdapterNumber": "1", "DxgiHighPerformanceIndex": "0"}
    assert key(moved) == key()
    # A library that no package contains has a time, and that of a frozen app a new one at each start.
    for frozen, number in ((False, 2), (True, 1)):
        monkeypatch.setattr(sys, "frozen", frozen, raising=False)
        library = tmp_path / "library.so"
        found_keys = set()
        for seconds in (1, 2):
            library.write_bytes(b"library")
            os.utime(library, (seconds, seconds))
            found_keys.add(key(device("NPU", library_path=str(library))))
        assert len(found_keys) == number


@needs_qnn
def test_an_ep_without_a_package_has_no_version(qnn: Shipper) -> None:
    app = qnn(npu=changed(QNN, plugin=None))
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    app.load("a", device="any", fallback="jit", target="npu")
    assert len(kept(app)) == 1


@needs_qnn
def test_the_oldest_contexts_make_room(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jit(broken)
    (own,) = kept(broken)
    size = sum(file.stat().st_size for file in own.iterdir())
    folder = own.parent
    now = time.time()
    for index, name in enumerate(("oldest", "middle", "newest")):
        (folder / name / "inside").mkdir(parents=True)
        (folder / name / "inside" / "context.bin").write_bytes(bytes(10_000))
        os.utime(folder / name, (now - 1000 + index, now - 1000 + index))
    # Unused for longer than the others, and kept because it is opened now.
    os.utime(own, (now - 5000, now - 5000))
    monkeypatch.setattr(_recompile, "CACHE_LIMIT", size + 35_000)
    jit(broken)
    assert [each.name for each in kept(broken)] == sorted(["middle", "newest", own.name])
    assert own.stat().st_mtime >= now - 60, "its use counts"
    monkeypatch.setattr(_recompile, "CACHE_LIMIT", 1)
    jit(broken)
    assert kept(broken) == [own]


@needs_qnn
def test_what_killed_processes_left_is_removed_after_a_day(broken: Any) -> None:
    jit(broken)
    (own,) = kept(broken)
    old, new = own.parent / ".new-old", own.parent / ".new-new"
    for each in (old, new):
        each.mkdir()
        (each / "half.bin").write_bytes(b"half")
    os.utime(old, (0, 0))
    jit(broken)
    assert kept(broken) == sorted([new, own])


@needs_qnn
def test_a_folder_that_vanishes_while_the_sizes_are_counted_does_not_matter(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit(broken)
    (own,) = kept(broken)
    monkeypatch.setattr(
        Path, "rglob", lambda self, pattern: iter([self / "removed by another process"])
    )
    assert broken.target_of(jit(broken)) == "npu"
    assert kept(broken) == [own]


@needs_qnn
def test_a_context_is_compiled_from_a_zip_archive(
    qnn: Shipper, from_zip: Callable[[], Any], tmp_path: Path
) -> None:
    qnn(npu=QNN)
    damage(qnn.folder / "a/npu/a_ctx_qnn.bin")
    app = from_zip()
    assert app.target_of(jit(app)) == "npu"
    (folder,) = kept(app)
    assert folder.parent.parent.name == "zipped"
    gc.collect()
    assert not list((tmp_path / "temp").iterdir())


@needs_qnn
def test_an_onnxruntime_that_cannot_compile_skips_it(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(onnxruntime, "ModelCompiler")
    steps = broken.explain("a", device="any", fallback="jit")
    assert outcomes(steps) == [("npu", "failed"), ("npu", "skipped"), ("source", "opened")]
    assert "cannot compile models" in steps[1].reason


@needs_qnn
def test_a_kept_context_whose_ep_is_missing_is_not_thrown_away(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit(broken)
    (own,) = kept(broken)

    def refuse(*_: Any) -> Any:
        raise broken.SkipTargetError("the session was opened without it")

    monkeypatch.setattr(broken.Opener, "open", refuse)
    caplog.clear()
    step = broken.explain("a", device="any", fallback="jit")[0]
    assert str(step) == "npu: skipped, the session was opened without it"
    assert kept(broken) == [own]
    assert "is compiled" not in caplog.text


def test_windows_locks_and_unlocks_the_first_byte(
    ship: Shipper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(cpu=CPU)
    calls: list[tuple[str, int]] = []

    def locking(descriptor: int, mode: str, count: int) -> None:
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        calls.append((mode, count))
        if len(calls) == 1:
            raise PermissionError("another process has it")

    fake = SimpleNamespace(LK_NBLCK="lock", LK_UNLCK="unlock", locking=locking)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setattr(sys, "platform", "win32")
    with _recompile._locked(tmp_path / "some.lock"):
        assert calls == [("lock", 1), ("lock", 1)]
    assert calls[2:] == [("unlock", 1)]

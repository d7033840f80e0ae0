from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hatch_epcontext.files import FileRecord, record_file
from hatch_epcontext.jobs.executors import store as store_module
from hatch_epcontext.jobs.executors.store import ArrivalError, Store, read_chunk


def written(path: Path, data: bytes) -> FileRecord:
    path.write_bytes(data)
    return record_file(path)


def nothing() -> None:
    pass


class Sender:
    """Sends the file ``path`` in chunks when it is asked for, and counts how often it is."""

    def __init__(self, store: Store, path: Path, chunk: int = 3) -> None:
        self.store, self.path, self.chunk = store, path, chunk
        self.asked = 0

    def __call__(self, record: FileRecord) -> None:
        self.asked += 1
        threading.Thread(target=self.send, args=(record,)).start()

    def send(self, record: FileRecord) -> None:
        for offset in range(0, self.path.stat().st_size, self.chunk):
            chunk = read_chunk(self.path, offset, self.chunk)
            if not self.store.receive(record.sha256, offset, chunk):
                return
        self.store.refuse(record.sha256, "too late")


def test_a_file_arrives_once_and_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789")
    sender = Sender(store, tmp_path / "file")
    for name in ("a", "b", "b"):
        store.place(record, tmp_path / "deep" / name, sender, nothing)
        assert (tmp_path / "deep" / name).read_bytes() == b"0123456789"
    assert sender.asked == 1
    empty = written(tmp_path / "empty", b"")
    store.place(empty, tmp_path / "deep" / "c", Sender(store, tmp_path / "empty"), nothing)
    assert (tmp_path / "deep" / "c").read_bytes() == b""


def test_threads_that_need_the_same_file_wait_for_one_arrival(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789" * 50)
    sender = Sender(store, tmp_path / "file")
    threads = [
        threading.Thread(target=store.place, args=(record, tmp_path / f"{n}", sender, nothing))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sender.asked == 1
    assert all(record_file(tmp_path / f"{n}") == record for n in range(8))


def test_a_file_that_is_not_as_recorded_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789")
    sender = Sender(store, tmp_path / "file")
    (tmp_path / "file").write_bytes(b"9876543210")
    with pytest.raises(ArrivalError, match="it changed"):
        store.place(record, tmp_path / "a", sender, nothing)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_bytes(b"0123456789")
    store.place(record, tmp_path / "a", sender, nothing)
    assert not store.receive(record.sha256, 0, b"0"), "nobody waits for it"


def test_a_sender_can_say_why_it_does_not_send(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789")

    def refuse(asked: FileRecord) -> None:
        store.refuse(asked.sha256, "the disk is gone")

    with pytest.raises(ArrivalError, match="the disk is gone"):
        store.place(record, tmp_path / "a", refuse, nothing)


def test_a_file_is_asked_for_again_when_nothing_comes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SILENCE_SECONDS", 0.1)
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789")
    sender = Sender(store, tmp_path / "file")
    asked = 0

    def ask(record: FileRecord) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            # The sender was lost after this.
            assert store.receive(record.sha256, 0, b"012")
        elif asked == 3:
            sender(record)

    store.place(record, tmp_path / "a", ask, nothing)
    assert asked == 3
    assert record_file(tmp_path / "a") == record


def test_a_file_that_the_store_forgets_at_once_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", 15)
    first, second = (written(tmp_path / name, name.encode() * 10) for name in ("a", "b"))
    add = Store._add

    def add_with_another(self: Store, record: FileRecord) -> None:
        add(self, record)
        if record == first:
            self.adopt(tmp_path / "b", second)

    monkeypatch.setattr(Store, "_add", add_with_another)
    store.place(first, tmp_path / "placed", Sender(store, tmp_path / "a"), nothing)
    assert {file.name for file in (tmp_path / "store").iterdir()} == {second.sha256}
    assert record_file(tmp_path / "placed") == first


def test_waiting_ends_with_the_build(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", 1000)
    record = written(tmp_path / "file", b"0123456789")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.place(record, tmp_path / "a", lambda _: None, interrupt)
    assert not any((tmp_path / "store").iterdir())


def test_the_least_used_files_are_forgotten_and_stay_where_they_were_placed(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "store", 25)
    senders: dict[str, Sender] = {}
    for name in ("a", "b", "a", "c"):
        record = written(tmp_path / name, name.encode() * 10)
        sender = senders.setdefault(name, Sender(store, tmp_path / name))
        store.place(record, tmp_path / f"placed-{len(list(tmp_path.iterdir()))}", sender, nothing)
    kept = {file.read_bytes()[:1] for file in (tmp_path / "store").iterdir()}
    assert kept == {b"a", b"c"}
    assert len([file for file in tmp_path.iterdir() if file.name.startswith("placed")]) == 4
    store.adopt(tmp_path / "b", record_file(tmp_path / "b"))
    store.place(record_file(tmp_path / "b"), tmp_path / "again", senders["b"], nothing)
    assert senders["b"].asked == 1

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hatch_epcontext.cache.signing import public_key
from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.location import LAYOUT
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.files import _OURS, temp_dir
from tests.cli.conftest import Cli

DAY = 86400


@pytest.fixture
def filled(cli: Cli, app_project: Path, user_cache: Path) -> Path:
    """A cache with two artifacts."""
    cli("build", app_project, "--target", "one")
    return user_cache


def entries(cache: Path, kind: str = "artifacts") -> list[Path]:
    return sorted((cache / LAYOUT / kind).glob("[!.]*"))


def age(entry: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(entry, (then, then))


def test_info_lists_all_artifacts_and_none(
    cli: Cli, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = cli("cache", "info").stdout
    assert printed.startswith(f"{filled}: 2 artifacts, ")
    for entry in entries(filled):
        assert entry.name[:12] in printed
    missing = filled.with_name("none")
    # Without what apps of this user have compiled.
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(missing))
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(missing))
    printed = cli("cache", "info").stdout
    assert printed == f"{missing}: 0 artifacts, 0 bytes\n"
    assert not missing.exists()


def test_new_keys_are_printed_and_not_stored(cli: Cli, user_cache: Path, project: Path) -> None:
    printed = cli("cache", "new-key").stdout
    private, public = re.findall(r"(ed25519-private:\S+)|(ed25519:[^\s\"]+)", printed)
    assert public_key(private[0]) == public[1]
    _, _, toml = printed.partition("This belongs in pyproject.toml:\n")
    table = parse(toml)["tool"]["epcontext"]["build"]
    assert table == {"shared-cache-keys": [public[1]]}
    assert cli("cache", "new-key").stdout != printed
    assert not user_cache.exists()


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_the_cache_must_be_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = cli("cache", "info", code=2)
    assert "this user has no home folder, and so no cache folder." in failed.stderr
    assert "HATCH_EPCONTEXT_CACHE_DIR" in failed.stderr
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", "~/x")
    failed = cli("cache", "info", code=2)
    assert "no home folder" in failed.stderr
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "none"))
    assert cli("cache", "info").stdout.endswith("0 bytes\n")


def test_artifacts_that_were_not_used_for_long_are_removed(
    cli: Cli, app_project: Path, filled: Path
) -> None:
    old, new = entries(filled)
    age(old, 31)
    age(new, 29)
    unused = [*entries(filled, "facts"), *entries(filled, "index")]
    refs = entries(filled, "refs")
    for path in unused:
        age(path, 31)
    report = filled / LAYOUT / "reports" / f"{app_project.name}.json"
    age(report, 29)
    printed = cli("cache", "prune", "--older-than", "30").stdout
    assert printed.startswith("removed 1 artifact, ")
    assert report.exists()
    age(report, 31)
    cli("cache", "prune", "--older-than", "30")
    assert not report.exists()
    assert "record" in printed
    assert entries(filled) == [new]
    assert not any(path.exists() for path in unused)
    # What named the other artifact is gone.
    assert 0 < len(entries(filled, "refs")) < len(refs)
    # A build that uses an artifact renews it.
    age(new, 31)
    cli("build", app_project, "--target", "one")
    assert cli("cache", "prune", "--older-than", "28").stdout.startswith("removed 0 artifacts, ")


def leave(cache: Path) -> Path:
    """What killed builds can leave in ``cache``, and the lock of one of them."""
    folder = cache / LAYOUT / "staging" / ".epcontext-abcd1234"
    (folder / "entry" / "files").mkdir(parents=True)
    (folder / "entry" / "files" / "a_ctx.onnx").write_bytes(b"model")
    (folder / ".lock").write_bytes(_OURS.format(folder.name).encode())
    temporary = cache / LAYOUT / "index" / ("ab" * 32) / ".record.json.17-4711.tmp"
    temporary.parent.mkdir(parents=True)
    temporary.touch()
    lock = cache / LAYOUT / "locks" / ("ab" * 32)
    lock.touch()
    return lock


def test_clearing_removes_only_files_of_the_cache_and_what_killed_builds_left(
    cli: Cli, filled: Path
) -> None:
    leave(filled)
    mine = [
        filled / "notes.txt",
        filled / ".mine.17-4711.tmp",
        filled / "staging" / "x1" / "mine",
        filled / LAYOUT / "my" / "x1" / "mine",
        filled / LAYOUT / "facts" / "mine" / ".mine.17-4711.tmp",
    ]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert cli("cache", "prune", "--all").stdout.startswith("removed 2 artifacts, ")
    assert sorted(path for path in filled.rglob("*") if path.is_file()) == sorted(mine)
    assert not list((filled / LAYOUT / "staging").iterdir())


def test_what_a_running_build_uses_stays(cli: Cli, filled: Path) -> None:
    with temp_dir(Store(filled).staging) as folder:
        (folder / "entry").mkdir()
        cli("cache", "prune", "--all")
        cli("cache", "prune", "--older-than", "1")
        assert (folder / "entry").is_dir()


def test_pruning_removes_what_killed_builds_left_long_ago(cli: Cli, filled: Path) -> None:
    lock = leave(filled)
    age(lock, 29)
    cli("cache", "prune", "--older-than", "30")
    assert not list((filled / LAYOUT / "staging").iterdir())
    assert lock.exists()
    age(lock, 31)
    cli("cache", "prune", "--older-than", "30")
    assert not lock.exists()
    assert len(entries(filled)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --older-than or --all"),
        (("--older-than", "30", "--all"), "either --older-than or --all"),
        (("--older-than", "30d"), "is not a valid integer range"),
        (("--older-than", "99999"), "is not in the range"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("cache", "prune", *arguments, code=2).stderr


def test_clearing_goes_on_behind_what_is_in_use(
    cli: Cli, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = entries(filled)

    discard = Store._discard

    def refusing(store: Store, entry: Path) -> None:
        if entry == first:
            raise PermissionError(13, "it is in use", str(first))
        discard(store, entry)

    monkeypatch.setattr(Store, "_discard", refusing)
    failed = cli("cache", "prune", "--all", code=1)
    assert str(first) in failed.stderr
    assert (first.exists(), second.exists()) == (True, False)


def test_paths_in_the_cache_are_short(filled: Path) -> None:
    """Windows takes 260 characters by default, and a user's folder has up to 60. Not run on Windows."""
    files = [path.relative_to(filled).as_posix() for path in filled.rglob("*") if path.is_file()]
    # Without the name of the model, which is in the names of some.
    assert max(map(len, files)) < 180

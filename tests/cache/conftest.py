from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remotes import WebServer, s3_server, web_server


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with web_server(tmp_path / "served") as running:
        yield running

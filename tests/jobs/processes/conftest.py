from __future__ import annotations

import pytest


@pytest.fixture
def one_server() -> None:
    """Here each build has a server of its own: when it starts and ends is what is tested."""

"""Names that no folder can have on Windows, or that are one folder there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.errors import Kind
from tests.config.examples import MODELS, problems
from tests.windows.conftest import only_windows

pytestmark = only_windows


@pytest.mark.parametrize(
    ("location", "toml"),
    [
        (
            "models[0].name",
            'targets.cpu.provider = "cpu"\n[[models]]\npath = "models/a.onnx"\nname = "con"',
        ),
        ("targets.Source", f'{MODELS}[targets.Source]\nprovider = "cpu"'),
    ],
    ids=["con", "Source"],
)
def test_a_name_is_refused(project: Path, location: str, toml: str) -> None:
    found = problems(project, toml)
    assert {key: each.kind for key, each in found.items()} == {location: Kind.INVALID_NAME}

"""Packages from PyPI with compiled models do what they did before."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.adopters.adopters import ADOPTERS, HERE, Adopter, apply, changed_lines, pip
from tests.conftest import needs_qnn
from tests.integration.conftest import make_environment, run, tool

WINDOW = 512
"""The samples for which a model of silero gives one score."""


@pytest.mark.parametrize("adopter", ADOPTERS, ids=lambda adopter: adopter.name)
def test_a_patch_is_small(adopter: Adopter) -> None:
    changed = changed_lines(adopter.patch)
    assert set(changed) <= {".toml", ".py", ".yaml"}
    assert 0 < changed[".toml"] < 25
    assert 0 < changed[".py"] <= 10
    assert changed.get(".yaml", 0) <= 2


@dataclass(frozen=True)
class Adopted:
    """What a package printed about itself: as it was, with compiled models, and on a simulated NPU."""

    adopter: Adopter
    plain: dict[str, Any]
    cpu: dict[str, Any]
    npu: dict[str, Any]
    printed: str
    """By the build with compiled models."""


@pytest.fixture(scope="module", params=ADOPTERS, ids=lambda adopter: adopter.name)
def adopted(
    request: pytest.FixtureRequest, env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Adopted:
    adopter: Adopter = request.param
    root = tmp_path_factory.mktemp(adopter.name)
    own = env | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    project = adopter.fetch(root / "fetched")
    before, _, seconds = build(project, root / "before", own)
    figures = [f"{adopter.name} unpatched: {size(before)}, built in {seconds:.0f} s"]
    apply(adopter.patch, project)
    after, printed, seconds = build(project, root / "after", own)
    figures.append(f"{adopter.name} patched: {size(after)}, built in {seconds:.0f} s")
    environment = make_environment(root / "venv", own)
    python = environment.executable("python")
    needed = (f"{before}{adopter.extra}", "onnxruntime-qnn>=2.7", *adopter.pins)
    pip(python, "install", "-q", *needed)
    script = (HERE / "apps" / adopter.script, *sounds(adopter, root))
    runs = {"plain": facts_in(environment.python(script[0], "plain", *script[1:]))}
    pip(python, "install", "-q", "--no-deps", "--force-reinstall", after)
    for device in ("cpu", "any"):
        runs[device] = facts_in(environment.python(script[0], device, *script[1:]))
    for device, facts in runs.items():
        opened = ", ".join(f"{name} {took:.3f} s" for name, took in facts["opened"].items())
        figures.append(f"{adopter.name} {device}: opened {opened}")
    print("\n".join([printed, *figures]))  # noqa: T201, shown by pytest -rP
    return Adopted(adopter, runs["plain"], runs["cpu"], runs["any"], printed)


def build(project: Path, folder: Path, env: Mapping[str, str]) -> tuple[Path, str, float]:
    """The wheel of ``project``, what its build printed, and the seconds that it took."""
    start = time.perf_counter()
    printed = run(
        tool("pyproject-build"), "--installer", "uv", "-w", "-o", folder, project,
        cwd=project.parent, env=env,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel, printed, time.perf_counter() - start


def sounds(adopter: Adopter, root: Path) -> list[Path]:
    """The speech that the tests of silero-vad come with, for packages that listen."""
    if adopter.name == "rapidocr-onnxruntime":
        return []
    silero = ADOPTERS[0]
    found = sorted(root.parent.glob(f"**/{silero.name.replace('-', '_')}-*/tests/data/test.wav"))
    return found[:1] or [silero.fetch(root / "sound") / "tests" / "data" / "test.wav"]


def size(wheel: Path) -> str:
    return f"{wheel.stat().st_size / 1e6:.1f} MB"


def facts_in(printed: str) -> dict[str, Any]:
    """What an app reports, in a line of its own: libraries print before and after it."""
    (line,) = (each for each in printed.splitlines() if each.startswith('{"targets"'))
    facts: dict[str, Any] = json.loads(line)
    return facts


@needs_qnn
@pytest.mark.adopters
@pytest.mark.network
@pytest.mark.slow
class TestAdopters:
    def test_all_models_are_validated(self, adopted: Adopted) -> None:
        for model, target in {*adopted.adopter.npu.items(), *adopted.adopter.cpu.items()}:
            (line,) = (
                each
                for each in adopted.printed.splitlines()
                if each.startswith(f"epcontext: {model} -> {target} (")
            )
            assert ", agrees on " in line

    def test_the_app_opens_the_targets_of_the_machine(self, adopted: Adopted) -> None:
        assert adopted.plain["targets"] == {}
        assert adopted.cpu["targets"] == adopted.adopter.cpu
        assert adopted.npu["targets"] == adopted.adopter.npu

    def test_the_cpu_gives_what_it_gave_before(self, adopted: Adopted) -> None:
        assert results(adopted.cpu) == results(adopted.plain)
        assert values(adopted.cpu) == pytest.approx(values(adopted.plain), abs=1e-4)

    def test_the_npu_gives_nearly_the_same(self, adopted: Adopted) -> None:
        before, after = adopted.plain, adopted.npu
        differences = [abs(a - b) for a, b in zip(values(before), values(after), strict=True)]
        largest, mean = max(differences), sum(differences) / len(differences)
        print(f"{adopted.adopter.name}: differs by {largest:.3f}, {mean:.4f} on average")  # noqa: T201
        assert largest < 0.1
        if "texts" in before:
            # Spaces depend on the exact frame of a line.
            assert [text.replace(" ", "") for text in after["texts"]] == [
                text.replace(" ", "") for text in before["texts"]
            ]
            assert after["boxes"] == [
                [pytest.approx(corner, abs=8) for corner in box] for box in before["boxes"]
            ]
        else:
            assert results(after) == {
                name: [pytest.approx(each, abs=WINDOW) for each in events]
                for name, events in results(before).items()
            }


def results(facts: Mapping[str, Any]) -> Any:
    """What the package is for: the texts, or the times of speech."""
    if "texts" in facts:
        return facts["texts"], facts["boxes"]
    return facts["times"]


def values(facts: Mapping[str, Any]) -> list[float]:
    """All scores, one after the other."""
    scores = facts["scores"]
    return (
        scores if isinstance(scores, list) else [each for part in scores.values() for each in part]
    )

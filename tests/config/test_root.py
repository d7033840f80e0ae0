from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.examples import MODELS, assert_one_problem, problems

CPU = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


@pytest.mark.parametrize(
    ("toml", "location", "message"),
    [
        ('targets.cpu.provider = "cpu"', "models", "is required"),
        (MODELS, "targets", "is required"),
        (f"{CPU}jbs = 1", "jbs", "is not a known key"),
        (f"{CPU}build = {{ jbs = 1 }}", "build.jbs", "is not a known key"),
        (f"{CPU}build = {{ jobs = 0 }}", "build.jobs", "must be at least 1"),
        (f"{CPU}build = {{ timeout = 0 }}", "build.timeout", "must be a number of seconds above 0"),
        (f'{CPU}build = {{ scheduler = "host" }}', "build.scheduler", "the address of a scheduler"),
        (f'{CPU}build = {{ scheduler = "tcp://user:secret@host:8786" }}',
         "build.scheduler", "without a user and a password"),
        (f'{CPU}build = {{ scheduler = "tcp://host:secret" }}',
         "build.scheduler", "the address of a scheduler"),
        (f"{CPU}build = {{ memory-limit = true }}", "build.memory-limit", "must be "),
        (f'{CPU}build = {{ memory-limit = "10 MiB" }}', "build.memory-limit", "must be "),
        (f'{CPU}wheel = {{ tag = "x" }}', "wheel.tag", "or a wheel tag such as"),
        (f'{CPU}output = "../x"', "output", "the path of a package"),
        (f"{CPU}embed = true", "embed", "is not a known key"),
    ],
)  # fmt: skip
def test_an_invalid_root_is_reported_with_its_key(
    project: Path, toml: str, location: str, message: str
) -> None:
    assert_one_problem(project, toml, location, message)
    assert not any("secret" in each.text() for each in problems(project, toml).values())

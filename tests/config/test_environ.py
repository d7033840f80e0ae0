from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.cache.signing import new_keys
from hatch_epcontext.config.environ import PREFIX, VARIABLES, Environment, read_environment
from hatch_epcontext.config.tables import BuildTable, WheelTable, declaration_of
from hatch_epcontext.errors import Kind, collect
from hatch_epcontext.text import toml_key
from tests.config.examples import MODELS, problems
from tests.config.examples import read as load

CPU = f'{MODELS}targets.cpu.provider = "cpu"\n'

PRIVATE, PUBLIC = new_keys()
KEYS = f'shared-cache-keys = ["{PUBLIC}"]'


def read(**variables: str) -> Environment:
    named = {f"{PREFIX}{name}": value for name, value in variables.items()}
    settings, found = collect(read_environment(named))
    assert not found
    return settings


def test_nothing_is_set_by_default_and_other_variables_do_not_count() -> None:
    environ = {"HATCH_VERBOSE": "1", "PATH": "/bin"}
    assert collect(read_environment(environ)) == (Environment(), [])
    # An empty variable counts as unset.
    assert read(JOBS="", TARGETS="  ") == Environment()
    assert read(VALIDATE="false").validate is False


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_paths_have_no_tilde() -> None:
    for name in ("CACHE_DIR", "REPORT"):
        _, (problem,) = collect(read_environment({f"{PREFIX}{name}": "~/x.html"}))
        assert "a path without ~, because this user has no home folder" in problem.message


def test_all_variables(tmp_path: Path) -> None:
    settings = read(
        SKIP="true",
        TARGETS="a, b,",
        FROM_CACHE="c",
        CACHE_DIR=str(tmp_path),
        REPORT=str(tmp_path / "r.html"),
        NO_CACHE="1",
        OFFLINE="1",
        SHARED_CACHE="s3://bucket/team",
        SHARED_CACHE_KEYS=f"{PUBLIC},{PUBLIC}",
        SHARED_CACHE_WRITE="1",
        SHARED_CACHE_KEY=PRIVATE,
        JOBS="3",
        TIMEOUT="2.5",
        MEMORY_LIMIT="8 GB",
        SCHEDULER="tls://host:8786",
        SBOM="1",
        TAG="py3-none-any",
        EDITABLE="compile",
        VALIDATE="require",
    )
    assert settings.skip
    assert settings.targets == ("a", "b")
    assert settings.from_cache == ("c",)
    assert settings.cache_dir == tmp_path
    assert settings.report == tmp_path / "r.html"
    assert settings.no_cache
    assert settings.offline
    assert settings.build == {
        "jobs": 3,
        "timeout": 2.5,
        "memory_limit": "8 GB",
        "shared_cache": "s3://bucket/team",
        "shared_cache_keys": (PUBLIC, PUBLIC),
        "scheduler": "tls://host:8786",
    }
    assert settings.wheel == {
        "tag": "py3-none-any",
        "sbom": True,
    }
    assert settings.shared_cache_write
    assert (settings.editable, settings.validate) == ("compile", "require")
    assert "HATCH_EPCONTEXT_JOBS=3" in settings.overrides
    # All but the private key.
    assert len(settings.overrides) == len(VARIABLES) - 1


def test_variables_switch_the_shared_cache_off_and_writing_on(project: Path) -> None:
    toml = f'{CPU}build = {{ {KEYS}, shared-cache = "s3://bucket/team", timeout = 7 }}'
    assert load(project, toml).build.shared_cache == "s3://bucket/team"
    assert load(project, toml, None, NO_CACHE="1").build.shared_cache is None
    assert not load(project, toml).build.shared_cache_write
    assert load(project, toml, None, SHARED_CACHE_WRITE="1").build.shared_cache_write
    assert problems(project, f"{CPU}build = {{ cache-write = true }}")
    config = load(project, toml, None, SHARED_CACHE=" ")
    assert config.build.shared_cache is None
    assert config.build.timeout == 7
    assert config.environment.overrides == (f"{PREFIX}SHARED_CACHE=",)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:sec-/ret@bucket/team",
        "s3://AKIAKEY:sec-ret",
        "https://builder:sec-ret@host/cache",
        "https://host/cache?sig=sec-ret",
        "az://container:sec-ret@account/team",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_printed(project: Path, url: str) -> None:
    toml = f"{CPU}build = {{ {KEYS}, shared-cache = '{url}' }}"
    for found in (problems(project, toml), problems(project, CPU, SHARED_CACHE=url)):
        (problem,) = found.values()
        assert "without a user, a password, a query" in problem.message
        assert "sec-ret" not in f"{problem} {problem.message}"


def test_the_cache_folder_is_absolute_wherever_the_build_runs() -> None:
    folder = read(CACHE_DIR="~/models").cache_dir
    assert folder is not None
    assert folder.is_absolute()
    assert "~" not in str(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JOBS", "0", "must be at least 1"),
        ("JOBS", "many", 'must be a whole number or "auto"'),
        ("TIMEOUT", "-1", "a number of seconds above 0"),
        ("TIMEOUT", "nan", "a number of seconds above 0"),
        ("TIMEOUT", "long", "must be a number"),
        ("TAG", "py3", "or a wheel tag such as"),
        ("MEMORY_LIMIT", "10 MiB", 'a size such as "250 MB"'),
        ("EDITABLE", "inplace", 'must be "source" or "compile" or "skip"'),
        ("VALIDATE", "yes", 'must be "auto" or "require"'),
        ("SKIP", "maybe", "true or false"),
        ("REPORT", "report.html", "an absolute path"),
        ("TARGET", "x", "is not a known variable"),
    ],
)
def test_an_invalid_variable_is_a_problem(name: str, value: str, message: str) -> None:
    settings, (problem,) = collect(read_environment({f"{PREFIX}{name}": value}))
    assert (problem.kind, problem.location) == (Kind.INVALID_VARIABLE, f"{PREFIX}{name}")
    assert message in problem.message
    assert dataclasses.replace(settings, overrides=()) == Environment()


# For each key of `build` and `wheel`: TOML, a variable, the value of the setting, an invalid variable.
SAMPLES: dict[tuple[str, str], tuple[str, str, Any, str]] = {
    ("build", "jobs"): ("7", "3", 3, "0"),
    ("build", "timeout"): ("7", "2.5", 2.5, "-1"),
    ("build", "memory_limit"): ("7", "1.5 kB", 1500, "much"),
    ("wheel", "sbom"): ("false", "1", True, "maybe"),
    ("wheel", "tag"): ('"py3-none-any"', "py3-none-win_arm64", "py3-none-win_arm64", "x"),
}


def keys_with_a_variable() -> list[tuple[str, str]]:
    tables = (("build", BuildTable), ("wheel", WheelTable))
    return [
        (name, key.name)
        for name, table in tables
        for key in dataclasses.fields(table)
        if declaration_of(key).has_variable
        # These need one another.
        and key.name not in ("scheduler", "shared_cache", "shared_cache_keys")
    ]


@pytest.mark.parametrize(("table", "name"), keys_with_a_variable())
def test_a_variable_wins_over_each_key_of_build_and_wheel(
    project: Path, table: str, name: str
) -> None:
    written, variable, value, invalid = SAMPLES[table, name]
    toml = f"{CPU}{table} = {{ {toml_key(name)} = {written} }}"
    assert getattr(getattr(load(project, toml), table), name) != value
    for text in (CPU, toml):
        config = load(project, text, None, **{name.upper(): variable})
        assert getattr(getattr(config, table), name) == value
        assert config.environment.overrides == (f"{PREFIX}{name.upper()}={variable}",)
    found = problems(project, toml, **{name.upper(): invalid})
    assert found.keys() == {f"{PREFIX}{name.upper()}"}
    assert VARIABLES[name.upper()].doc.startswith(f"Wins over `{table}.{toml_key(name)}`")


def test_variables_win_over_the_keys_of_the_shared_cache(project: Path) -> None:
    toml = f'{CPU}build = {{ {KEYS}, shared-cache = "s3://bucket/team" }}'
    other = new_keys()[1]
    settings = load(
        project, toml, None, SHARED_CACHE="s3://other", SHARED_CACHE_KEYS=f"{other}, {PUBLIC}"
    ).build
    assert settings.shared_cache == "s3://other"
    assert settings.shared_cache_keys == (other, PUBLIC)
    invalid = {"SHARED_CACHE": "ftp://x", "SHARED_CACHE_KEYS": "x"}
    assert problems(project, toml, **invalid).keys() == {f"{PREFIX}{name}" for name in invalid}


SHARED = {"SHARED_CACHE": "file:///mnt/shared"}
"""The cache through which the files of a cluster go."""


def test_variables_give_jobs_to_a_cluster(project: Path) -> None:
    address = "tcp://host:8786"
    assert load(project, CPU).build.scheduler is None
    for address in ("tcp://host:8786", "tls://host", "tcp://[::1]:8786", "inproc://10.0.0.1/2/3"):
        config = load(project, CPU, None, SCHEDULER=address, **SHARED)
        assert config.build.scheduler == address
    found = problems(project, CPU, SCHEDULER="tcp://user:secret@host:8786")
    assert "without a user and a password" in found[f"{PREFIX}SCHEDULER"].message
    assert not any("secret" in each.text() for each in found.values())


def test_a_cluster_needs_a_shared_cache(project: Path) -> None:
    cluster = {"SCHEDULER": "tcp://host:8786"}
    for without in ({}, {**SHARED, "NO_CACHE": "1"}):
        found = problems(project, CPU, **cluster, **without)
        assert found.keys() == {"build.shared-cache"}
        assert found["build.shared-cache"].kind is Kind.MISSING_KEY
    # It does not count where the cluster is switched off.
    assert load(project, CPU, None, SCHEDULER="").build.scheduler is None


def test_an_empty_variable_keeps_a_build_away_from_a_cluster(project: Path) -> None:
    toml = f'{CPU}build = {{ scheduler = "tcp://host:8786", jobs = 3 }}'
    assert load(project, toml, None, **SHARED).build.scheduler == "tcp://host:8786"
    config = load(project, toml, None, SCHEDULER=" ")
    assert (config.build.scheduler, config.build.jobs) == (None, 3)
    assert config.environment.overrides == (f"{PREFIX}SCHEDULER=",)


@pytest.mark.parametrize("name", ["SHARED_CACHE_KEY", "CACHEKEY"])
def test_keys_and_credentials_are_never_shown(name: str) -> None:
    found, problems = collect(read_environment({f"{PREFIX}{name}": "hunter2"}))
    assert "hunter2" not in str([problem.message for problem in problems])
    assert name != "SHARED_CACHE_KEY" or "hunter2" not in repr(found.overrides)
    environ = {
        f"{PREFIX}SHARED_CACHE": "s3://key:hunter2@bucket",
        f"{PREFIX}SCHEDULER": "tcp://a:hunter2",
    }
    found, problems = collect(read_environment(environ))
    assert "hunter2" not in repr((found.overrides, problems))
    assert f"{PREFIX}SHARED_CACHE=s3://***@bucket" in found.overrides

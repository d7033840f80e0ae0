from __future__ import annotations

from pathlib import Path

import pytest

from hatch_epcontext.cache.signing import new_keys, public_key
from hatch_epcontext.config.location import (
    check_cache_url,
    key_bytes,
)
from hatch_epcontext.errors import Kind
from tests.config.examples import MODELS, problems
from tests.config.examples import read as load

CPU = f'{MODELS}targets.cpu.provider = "cpu"\n'
PRIVATE, PUBLIC = new_keys()
SHARED = f'{CPU}build = {{ shared-cache = "s3://bucket/team", %s }}'


def test_a_pair_of_keys() -> None:
    assert len(key_bytes("ed25519-private:", PRIVATE)) == len(key_bytes("ed25519:", PUBLIC)) == 32
    assert public_key(PRIVATE) == PUBLIC
    assert new_keys() != (PRIVATE, PUBLIC)


@pytest.mark.parametrize(
    "key", ["", "ed25519:", "ed25519:AAAA", f"ed25519:{'A' * 48}", f"{'A' * 43}=", "x", "é"]
)
def test_what_is_no_key(project: Path, key: str) -> None:
    for kind, prefix in (("public", "ed25519:"), ("private", "ed25519-private:")):
        with pytest.raises(ValueError, match=f"a {kind} key as `epcontext cache new-key` prints"):
            key_bytes(prefix, key)
    if key:
        (problem,) = problems(project, CPU, SHARED_CACHE_KEY=key).values()
        assert problem.kind is Kind.INVALID_VARIABLE
        assert problem.message.endswith("prints it (ed25519-private:...).")


def test_a_private_key_in_the_place_of_a_public_one_is_not_printed(project: Path) -> None:
    (problem,) = problems(project, SHARED % f'shared-cache-keys = ["{PRIVATE}"]').values()
    assert "this is a private one" in problem.message
    assert PRIVATE not in str(problem)


def test_a_shared_cache_that_is_no_folder_needs_keys(project: Path) -> None:
    (problem,) = problems(project, SHARED % "jobs = 1").values()
    assert (str(problem.key), problem.kind) == (
        "tool.epcontext.build.shared-cache-keys",
        Kind.MISSING_KEY,
    )
    assert "epcontext cache new-key" in str(problem)
    config = load(
        project, SHARED % f'shared-cache-keys = ["{PUBLIC}"]', None, SHARED_CACHE_KEY=PRIVATE
    )
    assert PRIVATE not in repr(config)
    assert config.build.shared_cache_keys == (PUBLIC,)
    assert config.build.shared_cache_key == PRIVATE
    assert config.build.trust == (PUBLIC,)
    assert (
        load(project, SHARED % "jobs = 1", None, SHARED_CACHE="file:///mnt/cache").build.trust
        is None
    )


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/team/models",
        "az://container/team",
        "file:///mnt/cache",
        "file:///C:/cache",
        "http://host:8080/cache",
    ],
)
def test_valid_urls(url: str) -> None:
    assert check_cache_url(url) is None


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("", "a URL with one of s3://"),
        ("ftp://host/cache", "a URL with one of s3://"),
        ("simplecache::s3://bucket", "a URL with one of s3://"),
        ("s3://bucket::file:///etc", "a URL with one of s3://"),
        ("http://[host/cache", "a URL with one of s3://"),
        ("s3://", "a bucket, container or host after s3://"),
        ("file://folder/cache", "an absolute path"),
        ("file:///", "an absolute path"),
        ("az://user@container/team", "without a user"),
    ],
)
def test_invalid_urls(url: str, allowed: str) -> None:
    assert allowed in (check_cache_url(url) or "")

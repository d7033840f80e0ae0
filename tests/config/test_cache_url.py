from __future__ import annotations

import pytest

from hatch_epcontext.config.cache_url import check_cache_url


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/team/models",
        "gs://bucket/team",
        "az://container/team",
        "abfs://container@account.dfs.core.windows.net/team",
        "file:///mnt/cache",
        "file:///C:/cache",
        "http://host:8080/cache",
        "https://host/cache",
    ],
)
def test_valid_urls(url: str) -> None:
    assert check_cache_url(url) is None


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("", "a URL with one of s3://"),
        ("/mnt/cache", "a URL with one of s3://"),
        ("s3:bucket", "a URL with one of s3://"),
        ("ftp://host/cache", "a URL with one of s3://"),
        ("simplecache::s3://bucket", "a URL with one of s3://"),
        ("s3://bucket::file:///etc", "a URL with one of s3://"),
        ("http://[host/cache", "a URL with one of s3://"),
        ("s3://", "a bucket, container or host behind s3://"),
        ("https:///cache", "a bucket, container or host behind https://"),
        ("file://folder/cache", "an absolute path"),
        ("file:///", "an absolute path"),
        ("abfs://user@container/team", "without a user"),
    ],
)
def test_invalid_urls(url: str, allowed: str) -> None:
    assert allowed in (check_cache_url(url) or "")

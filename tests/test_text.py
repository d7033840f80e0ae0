from __future__ import annotations

import json
import math
import re
import urllib.parse
from datetime import date
from typing import Any

import pytest

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.text import (
    dotted,
    file_name,
    hide_credentials,
    hide_values,
    listing,
    narrow,
    parse_size,
    printable,
    quoted_key,
    show,
    show_size,
    suggestion,
    to_toml,
    toml_key,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (2_150_000, "2.1 MB"),
        (3_000_000_000, "3.0 GB"),
        (5 * 10**12, "5000.0 GB"),
        (10**400, "more than 10^24 bytes"),
    ],
)
def test_sizes_have_decimal_units(size: int, text: str) -> None:
    assert show_size(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (250000, 250_000),
        ("12 B", 12),
        ("3 KB", 3000),
        ("250 MB", 250_000_000),
        (" 1.5GB ", 1_500_000_000),
    ],
)
def test_sizes_are_parsed(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", [0, -1, "0 MB", "0.1", "", "MB", "10 MiB", "1e6", "1,5 MB", "1 mB", 10**29, "9" * 5000]
)
def test_text_that_is_no_size_is_an_error(text: int | str) -> None:
    with pytest.raises(ValueError, match='a number of bytes, or a size such as "250 MB"'):
        parse_size(text)


@pytest.mark.parametrize(
    "value",
    [
        3,
        1e-07,
        math.inf,
        True,
        "text",
        'quotes " and \\ and \n and \t and \x00 and \x7f and é and 💡',
        [],
        {},
        [1, [2, "three"], {"a": False}],
        {"bare-key_1": 1, "a b": {"": [1.5], "é.💡": {}}, '"': {"x\ny": "z"}},
    ],
)
def test_a_value_in_toml_parses_back(value: Any) -> None:
    text = to_toml(value)
    assert "\n" not in text
    assert parse(f"value = {text}") == {"value": value}


def test_a_value_in_toml_looks_like_a_user_writes_it() -> None:
    assert to_toml({"rtol": 0.1, "a b": [1, True]}) == '{ rtol = 0.1, "a b" = [1, true] }'
    assert to_toml((1, 2)) == "[1, 2]"
    assert math.isnan(parse(f"value = {to_toml(math.nan)}")["value"])
    assert to_toml(date(2020, 1, 2)) == '"2020-01-02"'


def test_keys() -> None:
    assert toml_key("provider_options") == "provider-options"
    assert quoted_key("a-b_C9") == "a-b_C9"
    assert quoted_key("a.b") == '"a.b"'
    assert quoted_key("a\n") == r'"a\n"'
    assert quoted_key("é") == r'"\u00e9"'


def test_a_shown_value_is_short() -> None:
    assert show("x" * 58) == f'"{"x" * 58}"'
    assert show("x" * 100) == f'"{"x" * 56}...'
    assert len(show("x" * 100)) == 60
    assert show(date(2020, 1, 2)) == '"2020-01-02"'


def test_names_in_a_sentence() -> None:
    assert listing(["a"]) == "a"
    assert listing(["a", "b"]) == "a and b"
    assert listing(name for name in "abc") == "a, b and c"
    assert listing("abc", most=3) == "a, b and c"
    assert listing("abcde", most=3) == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a b/c\\d", "a_b_c_d"),
        ("../é x", "x"),
        ("..", "model"),
        ("", "model"),
        ("Con.v2", "model_Con.v2"),
    ],
)
def test_file_names_are_portable(text: str, name: str) -> None:
    assert file_name(text, "_") == name


def test_a_suggestion_names_the_nearest_and_all_unless_the_list_is_long() -> None:
    assert suggestion("jbs", ["timeout", "jobs"]) == 'Did you mean "jobs"? Allowed: timeout, jobs.'
    names = [f"name-{index}" for index in range(20)]
    assert suggestion("name-1x", names) == 'Did you mean "name-1"?'
    assert suggestion("other", names).startswith("Allowed: name-0, name-1,")
    assert suggestion("ned", ["net"]) == 'Did you mean "net"? Allowed: net.'
    assert suggestion("npu", ["qnn", "cpu"]) == "Allowed: qnn, cpu."
    assert suggestion("dimensions", ["dims", "cut"]).startswith('Did you mean "dims"?')


def test_a_dotted_key_has_quotes_only_where_it_needs_them() -> None:
    assert dotted(("a", "b c", 0, "d-e")) == 'a."b c"[0].d-e'
    assert dotted(()) == ""


def test_values_are_hidden_in_every_form() -> None:
    text = 'a "q\\"x" b q"x c line1\nline2 line1'
    assert hide_values(text, ['q"x', "line1\nline2", " ", ""]) == 'a "***" b *** c *** ***'


SECRET = 'Pä$$ w/o"rd\\+%\t🙂'


@pytest.mark.parametrize(
    "spelling",
    [
        SECRET,
        SECRET.upper(),
        SECRET.swapcase(),
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        json.dumps(SECRET).replace("/", "\\/"),
        json.dumps(SECRET).upper(),
        repr(SECRET),
        ascii(SECRET),
        to_toml(SECRET),
        urllib.parse.quote(SECRET),
        urllib.parse.quote(SECRET, safe=""),
        urllib.parse.quote(SECRET, safe="").lower(),
        urllib.parse.quote_plus(SECRET),
        "".join(f"%{octet:02X}" for octet in SECRET.encode()),
        repr(SECRET.encode()),
    ],
)
def test_values_are_hidden_however_they_are_written(spelling: str) -> None:
    shown = hide_values(f"key={spelling};", [SECRET])
    assert re.fullmatch(r"""key=b?["']?\*\*\*["']?;""", shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://host:8080/a.html", "see https://host:8080/a.html"),
        ("s3://bucket/a, s3://other", "s3://bucket/a, s3://other"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("'s3://key:se/c@ret@bucket'", "'s3://***@bucket'"),
        ('"https://host/a?sig=secret" 404', '"https://host/a?***" 404'),
        ("https://host/a#secret", "https://host/a#***"),
        ("https://host/a;token=secret", "https://host/a;***"),
        ("https://host/a%3Fsig=secret", "https://host/a%3F***"),
        (
            "tcp://[::1]:8786 and tls://[fe80::1%eth0]:1/",
            "tcp://[::1]:8786 and tls://[fe80::1%eth0]:1/",
        ),
        ("tcp://[::1]:secret", "tcp://***"),
        ("tcp://[::1:secret", "tcp://***"),
        ("tcp://user:secret@[::1]:8786", "tcp://***@[::1]:8786"),
    ],
)
def test_credentials_in_urls_are_hidden(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown
    assert "secret" not in show(text)


SCHEMES = "https:// htps:// https:/ https: https// // http:\\\\ https:/// HTTPS:// s3: url=https:// 'https://"
MISTYPED = [
    f"{scheme}{user}:{password}@{host}"
    for scheme in (*SCHEMES.split(), "", " https://", "https ://", "simplecache::s3://")
    for user in ("sesame", "se same", "s", "se/same", "")
    for password in (
        "open",
        "op en",
        "o@pen",
        "o:p/e?n",
        "o#pen",
        "op'en",
        'op"en',
        "op\nen",
        "%6Fpen",
    )
    for host in ("host/a", "host:80a/", "host:/x y", "[::1", "host?open=1", "host/#open")
]


def test_credentials_in_values_are_hidden_however_they_are_mistyped() -> None:
    allowed = re.compile(r"""["' ]*(?:[\w+.=-]+ ?:?/*:*)*(?:\*\*\*)?""")
    for value in MISTYPED:
        for shown in (show(value), show([value]), show({"a": value})):
            before, stars, _ = shown.partition("***")
            assert stars, value
            assert "open" not in shown, (value, shown)
            assert "sesame" not in shown, (value, shown)
            assert "se same" not in shown, (value, shown)
            assert allowed.match(before)


@pytest.mark.parametrize(
    "text",
    [
        "models/a@2.onnx",
        "C:\\models\\a@b.onnx",
        "C:/models/a@b.onnx",
        "me@example.org",
        "a?b#c",
        "1:2",
    ],
)
def test_what_is_no_url_is_shown_as_it_is(text: str) -> None:
    assert show(text) == to_toml(text)
    assert hide_credentials(text) == text


HIDDEN = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u200e\u2028\u202e\u2069",
    "\ud800",
]


@pytest.mark.parametrize("lines", [False, True])
def test_what_a_terminal_obeys_is_shown_as_an_escape(lines: bool) -> None:
    shown = printable("".join(HIDDEN), lines=lines)
    kept = {"\t", "\n"} if lines else {"\t"}
    assert {each for each in shown if each in HIDDEN} == kept
    assert printable("\x1b]0;a\x07\r\u202e") == r"\x1b]0;a\x07\r\u202e"
    assert printable("a \\x1b [red] ä 模型 🙂") == "a \\x1b [red] ä 模型 🙂"
    # What is shown twice is shown the same.
    assert printable(shown, lines=lines) == shown


def test_wide_lines_of_a_log_are_read_beside_others() -> None:
    wide = "[W:onnxruntime] C:\\Müller\n".encode("utf-16-le")
    log = b"\xc3\xbc says Python\r\n" + wide + b"end\n"
    assert narrow(log).decode().splitlines() == [
        "ü says Python",
        "[W:onnxruntime] C:\\Müller",
        "end",
    ]
    halves = [narrow(log[:cut]) + narrow(log[cut:]) for cut in range(len(log))]
    assert all(b"C:\\M" in each and b"\0" not in each for each in halves)

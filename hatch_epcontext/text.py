"""Text for messages: sizes, keys, values and suggestions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_NAMED = 5
"""Of more files, models or sizes than this, most messages give the number."""

_MAX_ALLOWED = 12
"""The most allowed names that are listed beside a suggestion."""

_UNPRINTABLE = re.compile(
    # Control characters, but no tab; DEL; marks that change the direction of text; and separators.
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069"
    # Invisible characters.
    r"\xad\u200b-\u200f\u2060-\u2064\ufeff\U000e0000-\U000e007f"
    # Surrogates, which file names can contain, but no output.
    r"\ud800-\udfff]"
)

_ENDLESS = 10**24
"""Bytes from which a size is not shown exactly: untrusted text may have any number of digits."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_HUB_NAME = r"(?![.-])(?:(?!--|\.\.)[A-Za-z0-9_.-]){1,96}(?<![.-])"

HUB_REPO = rf"{_HUB_NAME}/{_HUB_NAME}(?<!\.git)"
"""A repository in a location of a model hub, such as ``org/name``: its revision follows after an @.

Source of what names may have: ``validate_repo_id`` of huggingface_hub.
"""

_NO_USER = rf"""(?!hf://{HUB_REPO}@[^@\s'"]*(?:['"\s]|$))"""

_IPV6 = r"\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]"
_HOST = rf"""(?:(?:\*\*\*@)?{_IPV6}|(?!(?:\*\*\*@)?{_IPV6})[^\s/:'"]*)"""


def printable(text: str, *, lines: bool = False) -> str:
    r"""``text``, perhaps untrusted, for a terminal or a page.

    Control characters, invisible characters and marks that change the direction of text become escapes
    such as ``\x1b``. Tabs stay, and line breaks only with ``lines``.
    """

    def escaped(match: re.Match[str]) -> str:
        if lines and match[0] == "\n":
            return "\n"
        return match[0].encode("unicode_escape").decode("ascii")

    return _UNPRINTABLE.sub(escaped, text)


def toml_key(name: str) -> str:
    """The TOML key of a dataclass's field: ``provider-options`` for ``provider_options``."""
    return name.replace("_", "-")


def quoted_key(name: str) -> str:
    """``name`` as a key in TOML: quoted unless it is a bare key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def _toml_string(text: str) -> str:
    # JSON writes characters beyond U+FFFF as surrogates, which TOML forbids, and U+007F unescaped.
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\U{code:08x}" if code == 0x7F or code > 0xFFFF else json.dumps(character)[1:-1]


def dotted(parts: Iterable[str | int]) -> str:
    """Names of keys and indices of list items as one key: ``a."b c"[0]``."""
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{quoted_key(part)}" for part in parts
    )
    return text.removeprefix(".")


def show(value: Any) -> str:
    """``value`` in TOML, short enough for a message, and without credentials in URLs."""
    text = hide_credentials(to_toml(_without_credentials(value)))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_credentials(value: Any) -> Any:
    """A value without possible users, passwords and tokens: its texts may be URLs, or mistyped ones."""
    if isinstance(value, dict):
        return {key: _without_credentials(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_credentials(item) for item in value]
    return hide_url_credentials(value) if isinstance(value, str) else value


def hide_url_credentials(text: str) -> str:
    """``text``, a single value, with stars for possible users, passwords and tokens if it is a URL.

    Also for a mistyped URL: text with a colon or two slashes counts as one, unless it is a Windows path.
    """
    if re.match(rf"hf://{HUB_REPO}@[^@]*$", text):
        return text
    before, at, after = text.rpartition("@")
    if _DRIVE.match(text) or not re.search(r":|//", before if at else text):
        return text
    if at:
        scheme = re.match(r"[\w+.-]+://", text)
        text = f"{scheme[0] if scheme else ''}***@{after}"
    return hide_credentials(re.sub(rf"({_QUERY}).+", r"\1***", text, flags=re.DOTALL))


_DRIVE = re.compile(r"[A-Za-z]:[\\/]")

_QUERY = r"(?:[?#;&]|%3[fF]|%23)"
"""The start of a query or fragment, even if it is mistyped or encoded."""


def hide_credentials(text: str) -> str:
    """``text`` with stars for private keys, and for possible users, passwords and tokens in its URLs.

    Limits keep the time linear in the length of the text, which may be untrusted.
    """
    text = re.sub(r"""-private:[^\s'"]+""", "-private:***", text)
    text = re.sub(
        rf"""{_NO_USER}([A-Za-z][\w+.-]{{1,30}}:/{{1,9}})[^'"\n]{{0,999}}@""", r"\1***@", text
    )
    # Mistyped, or without a scheme.
    user = rf"""(?!{_DRIVE.pattern})(?<![^\s'"/])[^\s'"/:@]{{1,999}}:(?!/)[^\s'"]{{0,999}}@"""
    text = re.sub(user, "***@", text)
    # After a host only a port may follow: a word may be a password, and the host a user.
    text = re.sub(rf"""(:/{{1,9}}){_HOST}:(?!\d+(?:[/?#'"\s]|$))[^\s'"]+""", r"\1***", text)
    return re.sub(rf"""(:/{{1,9}}[^\s?#'"]{{0,999}}?{_QUERY})[^\s'"]+""", r"\1***", text)


def hide_values(text: str, values: Iterable[str]) -> str:
    """``text`` with stars for each of ``values`` and their lines, in any case and any escape."""
    secrets = {line for value in values for line in (value, *value.splitlines()) if line.strip()}
    for secret in sorted(secrets, key=len, reverse=True):
        pattern = "".join(map(_in_any_spelling, secret))
        text = re.sub(pattern, "***", text, flags=re.IGNORECASE)
    return text


def _in_any_spelling(character: str) -> str:
    """A pattern for ``character``: unescaped, percent-encoded, or escaped as in JSON, TOML, Python or C."""
    code = ord(character)
    octets = character.encode("utf-8", "surrogatepass")
    spellings = [
        "".join(f"%{octet:02x}" for octet in octets),
        "".join(f"\\x{octet:02x}" for octet in octets),
        *(f"\\u{code:04x}", f"\\U{code:08x}", f"\\x{code:02x}", f"\\{character}"),
        *(json.dumps(character)[1:-1], repr(character)[1:-1], character),
        *("+" if character == " " else ()),
    ]
    return f"(?:{'|'.join(map(re.escape, dict.fromkeys(spellings)))})"


def to_toml(value: Any) -> str:
    """``value`` in TOML, on one line."""
    if isinstance(value, dict):
        items = ", ".join(f"{quoted_key(key)} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, default=str)


def show_size(size: float) -> str:
    """A number of bytes with its unit: ``"2.2 MB"``."""
    if size >= _ENDLESS:
        return "more than 10^24 bytes"
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def parse_size(size: int | str) -> int:
    """The bytes of ``250000``, ``"250000"`` or ``"250 MB"``; raises ValueError with the allowed spellings."""
    match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?([kKMG]?B)?", str(size).strip())
    count = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    # No system has more.
    if not 0 < count < 2**63:
        raise ValueError('a number of bytes, or a size such as "250 MB"')
    return count


def near_name(name: str, allowed: Iterable[str]) -> str | None:
    """A question about the one of ``allowed`` that is similar to an unknown ``name``, if there is one."""
    # Imported here: only messages about mistakes need it.
    import difflib

    names = list(allowed)
    # "npu" is not "cpu", but "ned" is "net", and "dimensions" is "dims".
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    near += difflib.get_close_matches(
        name, [known for known in names if known[:1] == name[:1]], n=1
    )
    near += [known for known in names if len(known) > 3 and known[:3] == name[:3]]
    near += [known for known in names if len(name) > 3 and name in known]
    return f'Did you mean "{near[0]}"?' if near else None


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """A hint for an unknown ``name``: the most similar of ``allowed``, and all of them if they are few."""
    allowed = list(allowed)
    question = near_name(name, allowed)
    if question and len(allowed) > _MAX_ALLOWED:
        return question
    choices = f"Allowed: {', '.join(allowed)}." if allowed else None
    return " ".join(filter(None, [question, choices]))


def show_number(value: float) -> str:
    """``value`` for a message: an integer with all digits, another number with five."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.5g}"


def listing(names: Iterable[str], most: int | None = None) -> str:
    """Names in a sentence: ``"a, b and c"``; of more than ``most`` names the first and a number."""
    listed = list(names)
    if most is not None and len(listed) > most:
        listed = [*listed[:most], f"{len(listed) - most} more"]
    *others, last = listed
    return f"{', '.join(others)} and {last}" if others else last


def pairs(values: Mapping[str, object]) -> str:
    """Names with their values in a sentence: ``"soc_model 60, htp_arch 73"``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def aligned(rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """The lines of a table; the texts of a column begin at the same column, or end there if the first is
    in ``right``.
    """
    columns = []
    for cells in zip(*rows, strict=True):
        align = str.rjust if cells[0] in right else str.ljust
        columns.append([align(cell, max(map(len, cells))) for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def count(number: int, noun: str) -> str:
    """A number with its noun: ``"1 job"``, ``"2 jobs"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def narrow(log: bytes) -> bytes:
    """``log``, or a part of one, as UTF-8: on Windows ONNX Runtime writes some of its lines in UTF-16.

    Of the wide characters only those of Latin-1 stay readable.
    """
    if b"\0" not in log:
        return log
    wide = re.sub(rb"([\x80-\xff])\0", lambda match: match[1].decode("latin-1").encode(), log)
    return wide.replace(b"\0", b"")


def file_name(text: str, filler: str) -> str:
    """``text`` as a portable file name, with ``filler`` for every other character."""
    name = re.sub(r"[^A-Za-z0-9._-]", filler, text).strip("._-") or "model"
    return f"model{filler}{name}" if is_device(name) else name


def is_device(name: str) -> bool:
    """Whether Windows reserves ``name`` for a device, with any extension, and makes no file of that name.

    Source: "Naming Files, Paths, and Namespaces" in Microsoft's documentation.
    """
    return bool(re.match(r"(con|prn|aux|nul|com\d|lpt\d) *(\.|$)", name, re.IGNORECASE))

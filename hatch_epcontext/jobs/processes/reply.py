"""Reads the replies of workers, which can be anything: they run the code of vendors."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from hatch_epcontext.serialize import from_json
from hatch_epcontext.text import show_size
from hatch_epcontext.worker.requests import Refusal, ReplyT, Request

T = TypeVar("T")

_LIMIT = 64 * 10**6
"""Bytes of the largest reply: that of a graph with a million nodes has less."""

_LONGEST_REASON = 400
"""Characters of the reason why a reply cannot be read."""


class InvalidReplyError(Exception):
    """A reply that is not one; the message says why."""


def read_reply(path: Path, request: Request[ReplyT]) -> ReplyT:
    """The reply to ``request`` in the file ``path``; raises InvalidReplyError if it is none."""
    reply: ReplyT = _read(path, request.reply_type)
    if reason := request.misfit(reply):
        raise InvalidReplyError(reason)
    return reply


def read_refusal(path: Path) -> Refusal:
    """The refusal in the file ``path``; raises InvalidReplyError if it is none."""
    return _read(path, Refusal)


def _read(path: Path, type_: type[T]) -> T:
    """The ``type_`` in the file ``path``; raises InvalidReplyError if it is not one."""
    if (size := path.stat().st_size) > _LIMIT:
        reason = f"it has {show_size(size)}, and {show_size(_LIMIT)} are allowed"
        raise InvalidReplyError(reason)
    try:
        return from_json(path.read_bytes(), type_)
    except ValueError as error:
        raise InvalidReplyError(str(error)[:_LONGEST_REASON].rstrip(".")) from None

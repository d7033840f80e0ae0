"""Reads the replies of workers. They can be arbitrary bytes: workers run vendors' code."""

from __future__ import annotations

from typing import TypeVar

from hatch_epcontext.jobs.processes.running import MAX_REPLY
from hatch_epcontext.serialize import from_json
from hatch_epcontext.text import show_size
from hatch_epcontext.worker.requests import Refusal, ReplyT, WorkerRequest

T = TypeVar("T")

_MAX_REASON = 400
"""Characters that are shown of the reason why a reply cannot be read."""


class InvalidReplyError(Exception):
    """A reply that cannot be read; the message explains why."""


def read_reply(text: bytes, request: WorkerRequest[ReplyT]) -> ReplyT:
    """The reply in ``text`` to ``request``; raises InvalidReplyError if it is invalid."""
    reply: ReplyT = _read(text, request.reply_type)
    if reason := request.misfit(reply):
        raise InvalidReplyError(reason)
    return reply


def read_refusal(text: bytes) -> Refusal:
    """The refusal in ``text``; raises InvalidReplyError if it is invalid."""
    return _read(text, Refusal)


def _read(text: bytes, type_: type[T]) -> T:
    if len(text) > MAX_REPLY:
        raise InvalidReplyError(f"it has more than {show_size(MAX_REPLY)}")
    try:
        return from_json(text, type_)
    except ValueError as error:
        raise InvalidReplyError(str(error)[:_MAX_REASON].rstrip(".")) from None

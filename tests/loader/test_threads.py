"""Sessions of several threads and processes."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.loader.shipped import CPU, NPU, Shipper, changed, plugin_of


def test_models_that_share_weights_can_be_opened_in_several_threads(ship: Shipper) -> None:
    app = ship(cpu=changed(CPU, group="g"))
    # Threads change often, so that a set that changes while it is read is found out.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            kept = list(pool.map(app.load, ["a"] * 24))
    finally:
        sys.setswitchinterval(interval)
    (group,) = app._groups.values()
    assert len(group) == len(kept)


def test_a_session_that_shares_weights_keeps_earlier_sessions_alive(ship: Shipper) -> None:
    app = ship(cpu=changed(CPU, group="g"), other=CPU)
    first = weakref.ref(app.load("a"))
    assert first() is None
    kept = app.load("a")
    first = weakref.ref(kept)
    second = app.load("a")
    apart = app.load("a", target="other")
    third = app.load("a")
    # The sessions in C, of which the garbage collector clears no tuple.
    assert second.epcontext_earlier == (kept._sess,)
    assert set(third.epcontext_earlier) == {kept._sess, second._sess}
    assert not hasattr(apart, "epcontext_earlier")
    del kept, second, third
    gc.collect()
    assert first() is None
    assert not next(iter(app._groups.values()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_during_a_load_can_load(ship: Shipper) -> None:
    ship(npu=changed(NPU, plugin=plugin_of("slow_ep")), other=NPU)
    (ship.root / "slow_ep.py").write_text(SLOW_EP, encoding="utf-8")
    script = """
import json, os, signal, threading, warnings
import shipped, slow_ep
warnings.simplefilter("ignore", DeprecationWarning)
thread = threading.Thread(target=shipped.load, args=["a"])
thread.start()
slow_ep.entered.wait()
if (child := os.fork()) == 0:
    signal.alarm(30)
    shipped.explain("a", target="other")
    os._exit(0)
status = os.waitpid(child, 0)[1]
slow_ep.leave.set()
thread.join()
print(json.dumps(status))
"""
    assert ship.script(script) == 0


SLOW_EP = """
import threading
entered, leave = threading.Event(), threading.Event()
def get_library_path():
    entered.set()
    leave.wait()
    return "none"
"""

from __future__ import annotations

from hatch_epcontext import loader, shipped


def test_the_loader_repeats_what_it_shares_with_the_package() -> None:
    names = [name for name in vars(shipped) if name == "Device" or name.isupper()]
    assert len(names) > 1
    assert {n: getattr(loader, n) for n in names} == {n: getattr(shipped, n) for n in names}

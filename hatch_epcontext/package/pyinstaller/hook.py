# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""PyInstaller's hook of the package above: it collects the models, and the EPs that are installed."""

import json
from importlib.util import find_spec
from pathlib import Path

from PyInstaller.utils.hooks import collect_all, collect_data_files, logger

_name = Path(__file__).stem.removeprefix("hook-")
_folder = Path(__file__).parents[1]
_manifest = json.loads((_folder / "manifest.json").read_bytes())
if _manifest["layout"] == "installed":
    raise SystemExit(
        f"{_name} is an editable install: PyInstaller needs the app's wheel (pip install .)"
    )
datas, binaries = collect_data_files(_name), []
hiddenimports = ["importlib.resources", "numpy", "onnxruntime"]
# The loader imports these only where a model needs them.
hiddenimports += [f"{_name}.{module.stem}" for module in _folder.glob("_[a-z]*.py")]
_components = [*_manifest["components"].values()]
for _module in _manifest["additional_metadata"]["hatch-epcontext"]["companions"]:
    if (_spec := find_spec(_module)) and _spec.origin:
        datas += collect_data_files(_module)
        hiddenimports.append(_module)
        _text = Path(_spec.origin).with_name("manifest.json").read_bytes()
        _components += json.loads(_text)["components"].values()
    else:
        logger.warning("%s is not installed, and left out", _module)
for _component in _components:
    for _variant in _component["variants"].values():
        _plugin = _variant["additional_metadata"]["hatch-epcontext"].get("plugin")
        if _plugin and _plugin["module"] and find_spec(_plugin["module"].partition(".")[0]):
            _collected = collect_all(_plugin["module"])
            datas += _collected[0]
            binaries += _collected[1]
            hiddenimports += _collected[2]
        elif _plugin:
            logger.warning("%s: %s is not installed, and left out", _name, _plugin["package"])

"""Any other EP that comes as a plugin library: what is known of it, the configuration says."""

from __future__ import annotations

from hatch_epcontext.providers.base import Provider, Tolerance

PROVIDER = Provider(
    name="plugin",
    ep="",
    title="any other plugin EP",
    product="context",
    flavours=("onnxruntime", "onnxruntime-gpu"),
    devices=("any", "npu", "gpu", "cpu"),
    tolerance=Tolerance(rtol=1e-2, atol=5e-2, cosine=0.99),
    verified="A library of an EP without EP contexts is loaded, and refused for that, on Linux x86-64.",
    needs_library=True,
    virtual_devices=True,
    shares_weights=True,
    loads_shared=True,
    any_options=True,
    notes=(
        (
            "`library` is a package with `get_library_path()`, or the path of the library; `ep-name` is "
            "what ONNX Runtime calls the EP, and `registration-name` what the library is registered as, "
            "which some libraries take for the EP's name."
        ),
        "Its options are not known, so none is checked.",
        (
            "Where `library` is a path, the app has to register the library before it calls `load`, "
            "with `onnxruntime.register_execution_provider_library`."
        ),
    ),
)

"""Copies the standard library of this Python for the one of Windows: ``library.py FOLDER``."""

import re
import shutil
import sys
import sysconfig
from pathlib import Path

OWN = Path(__file__).parent


def main(folder: Path) -> None:
    left_out = ("site-packages", "test", "lib-dynload", "__pycache__", "config-*")
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        folder,
        ignore=shutil.ignore_patterns(*left_out),
        dirs_exist_ok=True,
    )
    _mend(folder / "importlib" / "metadata" / "__init__.py")
    site = folder / "site-packages"
    shutil.copy(OWN / "nolinks.py", site)
    (site / "nolinks.pth").write_text("import nolinks\n", encoding="utf-8")


def _mend(metadata: Path) -> None:
    # Some releases of 3.11 have no decorator there, and python311.dll calls the method on the class.
    text = metadata.read_text(encoding="utf-8")
    method = "    def invalidate_caches(cls):"
    text = re.sub(rf"(    @classmethod\n)?{re.escape(method)}", f"    @classmethod\n{method}", text)
    metadata.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

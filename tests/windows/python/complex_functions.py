"""Gives modules the complex functions of C99, which Wine's C runtime lacks and numpy calls.

``complex_functions.py FOLDER``: modules below FOLDER that import them get a library of another name, of
the same length. It has the complex functions itself, from mingw-w64, and forwards all others.
"""

import re
import subprocess
import sys
from pathlib import Path

OLD, NEW = "api-ms-win-crt-math-l1-1-0.dll", "api-ms-win-crt-mth9-l1-1-0.dll"

NAMES = "abs acos acosh arg asin asinh atan atanh cos cosh exp imag log pow proj real sin sinh sqrt tan tanh"
COMPLEX = {f"c{name}{suffix}" for name in NAMES.split() for suffix in ("", "f")} | {"conj", "conjf"}


def main(folder: Path) -> None:
    modules = {
        file: names
        for pattern in ("*.pyd", "*.dll")
        for file in folder.joinpath("Lib", "site-packages").rglob(pattern)
        if OLD.encode() in file.read_bytes() and (names := _imported(file)) & COMPLEX
    }
    needed = set[str]().union(*modules.values())
    own = sorted(needed & COMPLEX)
    source, definition = Path("complex.c"), Path("complex.def")
    source.write_text("#include <complex.h>\n" + "".join(map(_function, own)), encoding="utf-8")
    exports = [f"{name} = ucrtbase.{name}" for name in sorted(needed - COMPLEX)]
    exports += [f"{name} = own_{name}" for name in own]
    definition.write_text("\n".join([f"LIBRARY {NEW}", "EXPORTS", *exports, ""]), encoding="utf-8")
    compiler = ("x86_64-w64-mingw32-gcc", "-shared", "-O1", "-s", "-static-libgcc")
    subprocess.run([*compiler, "-o", folder / NEW, source, definition], check=True)
    for file in modules:
        file.write_bytes(file.read_bytes().replace(OLD.encode(), NEW.encode()))


def _imported(file: Path) -> set[str]:
    """The functions that ``file`` imports from the library of mathematics."""
    command = ("x86_64-w64-mingw32-objdump", "-p", str(file))
    # It fails for files for Arm, which are not used here.
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    table = re.search(rf"DLL Name: {re.escape(OLD)}\n(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return set(re.findall(r"\b(_?[a-z]\w*)\s*$", table[1], re.MULTILINE)) if table else set()


def _function(name: str) -> str:
    real = "float" if name.endswith("f") else "double"
    base = name.removesuffix("f")
    result = real if base in ("cabs", "carg", "cimag", "creal") else f"{real} complex"
    names = ("a", "b") if base == "cpow" else ("a",)
    parameters = ", ".join(f"{real} complex {each}" for each in names)
    return f"{result} own_{name}({parameters}) {{ return {name}({', '.join(names)}); }}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The part of the router that is compiled: where it is, and how it is made.

Optional. Without it the router does the same in Python, at more CPU per token. It is made on the machine that runs it
(``python -m pd_router.native``, needs a C compiler), so that the package stays one for all platforms: the same
distribution is put into engine images with other versions of Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("pump.c")
LIBRARY: Final = Path(__file__).with_name("pump.so")
_OPTIONS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
_COMPILERS: Final = ("cc", "gcc", "clang")


class NotBuilt(Exception):
    """There is no library, or it was made from another source; the text says what to do."""


def build(*more: str) -> Path:
    """Compile. Returns the library's path.

    Args:
        more: options for the compiler besides its own.

    Raises:
        NotBuilt: there is no compiler, or it failed.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NotBuilt(f"no C compiler is on the PATH: install one of {', '.join(_COMPILERS)}")
    new = LIBRARY.with_suffix(".new")
    stamp = f'-DSOURCE="{_source_hash()}"'
    done = subprocess.run(
        [compiler, *_OPTIONS, *more, stamp, "-o", str(new), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotBuilt(f"{compiler} failed: {done.stderr.strip()}")
    new.replace(LIBRARY)  # a router that runs keeps the file that it has
    return LIBRARY


def load() -> ctypes.PyDLL:
    """The library, which holds the interpreter's lock while it runs: each call takes microseconds.

    Raises:
        NotBuilt: it is not there, can't be loaded, or was made from another source.
    """
    advice = "make it with `python -m pd_router.native`"
    try:
        library = ctypes.PyDLL(str(LIBRARY))
        library.pump_source.restype = ctypes.c_char_p
        made_from = library.pump_source().decode()
    except (OSError, AttributeError) as error:
        reason = str(error) if LIBRARY.exists() else f"{LIBRARY} does not exist"
        raise NotBuilt(f"{reason}; {advice}") from error
    if made_from != _source_hash():
        raise NotBuilt(f"{LIBRARY} was made from another version of {SOURCE.name}; {advice}")
    return library


def _source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]

"""Files that are read again when they change: keys, certificates.

Separate because the rule is the same for all of them: what cannot be used is never put in the place of what could, and
the log says so once. A look costs a stat() per file; a Secret's files change by a swap of a symlink, which stat()
follows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pd_router.core.addresses import SettingsError
from pd_router.core.auth import FileProblem

log = logging.getLogger("pd_router.files")

MAX_BYTES = 16 * 1024 * 1024
T = TypeVar("T")


def read_text(path: str) -> str:
    """A small text file. Raises OSError or FileProblem."""
    with open(path, "rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise FileProblem(f"it is larger than {MAX_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FileProblem("it is not UTF-8 text") from None


class WatchedFile(Generic[T]):
    """What one or more files say, as `value`.

    Args:
        flags: for messages, one per path.
        paths: read together; a change of any is a change.
        load: reads them. Raises OSError (which ssl's errors are) or FileProblem.

    Raises:
        SettingsError: they cannot be used, at the start.
    """

    def __init__(self, flags: Sequence[str], paths: Sequence[str], load: Callable[[], T]) -> None:
        self._flags, self._paths, self._load = ", ".join(flags), tuple(paths), load
        self._seen = self._signature()
        self.trouble: str | None = None
        """Why the files, as they are now, are not what is in use."""
        try:
            self.value = load()
        except (OSError, FileProblem) as problem:
            raise SettingsError([f"{self._flags}: {', '.join(self._paths)}: {_words(problem)}"]) from problem

    def refresh(self) -> bool:
        """Look again. Returns whether there is a new value; keeps the last one when the files cannot be used."""
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            self.value = self._load()
        except (OSError, FileProblem) as problem:
            self.trouble = _words(problem)
            log.error(
                "%s: %s changed and cannot be used; what was read before stays in use: %s",
                self._flags,
                ", ".join(self._paths),
                self.trouble,
            )
            return False
        self.trouble = None
        log.info("%s: read again", self._flags)
        return True

    def _signature(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in self._paths:
            try:
                status = os.stat(path)
            except OSError as error:
                found.append(error.errno)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev))
        return tuple(found)


def _words(problem: OSError | FileProblem) -> str:
    if isinstance(problem, FileProblem):
        return str(problem)
    reason = getattr(problem, "reason", None)  # of an ssl error
    return str(reason or problem.strerror or type(problem).__name__)

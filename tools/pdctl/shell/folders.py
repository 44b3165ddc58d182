"""A folder that results or logs go to, tried out before anything is started.

Separate because every command that writes needs the same sentence, and needs it before it has worked for minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path


class FolderError(Exception):
    """A folder that can't be written to, in one sentence that names it."""


def writable_folder(path: Path) -> Path:
    """Make the folder if it isn't there, and write to it once.

    Raises:
        FolderError: it can't be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits say nothing to root, nor about a file system that takes no files.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FolderError(f"{path}: cannot be written to: {error.strerror}") from error
    return path

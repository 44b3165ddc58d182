"""Which vLLM versions are supported, and how a version is read from a field or from an image tag.

Older versions lack the expiry in the handle or have another connector protocol; newer ones are unknown, and an unknown
one may read wrong memory. The connector in the image checks again at start.
"""

from __future__ import annotations

import re
from typing import Final

Version = tuple[int, int]

OLDEST: Final[Version] = (0, 29)
NEWEST: Final[Version] = (0, 33)
SUPPORTED_TEXT: Final = "0.29 to 0.33"

_VERSION: Final = re.compile(r"^v?(\d+)\.(\d+)(?![\d])")
_NAMED_IN_TAG: Final = re.compile(r"vllm[-_.]?v?(\d+)\.(\d+)(?![\d])")


def version_of(text: str) -> Version | None:
    """`v0.32.0` → `(0, 32)`; None when the text does not begin with a version."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else None


def version_in_image(image: str) -> Version | None:
    """The vLLM version that an image's tag gives away, or None when it does not.

    A tag counts when the image is called after vLLM (`vllm-openai:v0.32.0`), or when the tag itself names it
    (`engine:3-vllm0.32.0`); another product's own version says nothing.
    """
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    if not tag:
        return None
    named = _NAMED_IN_TAG.search(tag)
    if named:
        return int(named[1]), int(named[2])
    return version_of(tag) if "vllm" in name else None


def is_supported(version: Version) -> bool:
    """Is this one of the versions that the product was built and tested for?"""
    return OLDEST <= version <= NEWEST


def version_text(version: Version) -> str:
    """`(0, 32)` → `0.32`."""
    return f"{version[0]}.{version[1]}"

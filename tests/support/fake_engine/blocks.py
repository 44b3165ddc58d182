"""An engine's KV memory: numbered blocks, a free list, reference counts and a prefix cache.

Separate because re-use of block numbers is the whole danger: a freed block keeps its content until somebody else gets
its number, and a reader who still holds the number then reads that somebody's tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from support.fake_engine.answers import BlockContent


def prefix_hashes(tokens: Sequence[int], block_tokens: int, salt: str) -> list[bytes]:
    """Chained hash of each whole block of ``tokens``; ``salt`` separates adapters and cache salts."""
    chain = hashlib.blake2b(salt.encode(), digest_size=16)
    hashes = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        chain.update(array("I", tokens[end - block_tokens : end]).tobytes())
        hashes.append(chain.digest())
    return hashes


class BlockPool:
    """Blocks ``0 .. count-1``. The one that was freed first is given out first, as vLLM does."""

    def __init__(self, count: int, block_tokens: int, *, caches_prefixes: bool) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._caches = caches_prefixes
        # Only blocks that were ever given out have entries, so that a large memory costs nothing.
        self._fresh = 0
        self._contents: dict[int, BlockContent] = {}
        self._references: dict[int, int] = {}
        self._freed: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return self.count - self._fresh + len(self._freed)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; their old content is still in them until the caller writes.

        Raises:
            MemoryError: when fewer are free.
        """
        if count > self.free:
            raise MemoryError(f"{count} blocks wanted, {self.free} free")
        taken = []
        for _ in range(count):
            if self._fresh < self.count:
                number, self._fresh = self._fresh, self._fresh + 1
            else:
                number, _none = self._freed.popitem(last=False)
            self._forget(number)
            self._references[number] = 1
            taken.append(number)
        return taken

    def release(self, numbers: Sequence[int]) -> None:
        """Give blocks back, last one first, so that a prefix stays cached longest."""
        for number in reversed(numbers):
            self._references[number] -= 1
            if self._references[number] == 0:
                self._freed[number] = None

    def write(self, number: int, content: BlockContent) -> None:
        """Store a copy of ``content``."""
        self._contents[number] = BlockContent(content.context, list(content.tokens))

    def read(self, number: int) -> BlockContent:
        """What is in a block now, whoever put it there. One that was never written reads as empty."""
        return self._contents.get(number) or BlockContent(b"", [])

    def cached_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the blocks of the longest cached prefix, sharing them with whoever else holds them."""
        found: list[int] = []
        for digest in hashes:
            number = self._cached.get(digest)
            if number is None:
                break
            found.append(number)
        for number in found:
            self._references[number] += 1
            self._freed.pop(number, None)
        return found

    def remember(self, numbers: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Offer whole blocks to later requests with the same prefix."""
        if not self._caches:
            return
        for number, digest in zip(numbers, hashes, strict=False):
            if digest not in self._cached and number not in self._hash_of:
                self._cached[digest] = number
                self._hash_of[number] = digest

    def _forget(self, number: int) -> None:
        digest = self._hash_of.pop(number, None)
        if digest is not None:
            self._cached.pop(digest, None)

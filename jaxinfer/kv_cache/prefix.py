"""The prefix index: which pages hold the keys and values of which token prefix.

A full page is named by a chained digest: the page before it, then its own token ids. Equal keys therefore mean
equal tokens all the way back to the start, under the same namespace (adapter, salt, KV dtype), which seeds the
chain. 128 bits, so that no request can be made to collide with another's pages.

Plain host state: no JAX, no locks; the engine's loop thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 16


def root_key(namespace: bytes = b"") -> bytes:
    """The key that a chain of pages starts from; different namespaces never share a page."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"kv-root").digest()


def page_key(parent: bytes, token_bytes: bytes | memoryview) -> bytes:
    """The key of a full page: `parent` is the key of the page before it, `token_bytes` its token ids as int32."""
    digest = blake2b(parent, digest_size=DIGEST_BYTES)
    digest.update(token_bytes)
    return digest.digest()


class PrefixIndex:
    """A one-to-one map between page keys and page ids. It holds no references: `PageAllocator` decides who stays."""

    __slots__ = ("_key_of", "_page_of")

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def add(self, key: bytes, page: int) -> bool:
        """Name a page. The first page of a content stays: returns False, and changes nothing, if the key is taken.

        Raises:
          ValueError: the page has another key already.
        """
        if key in self._page_of:
            return False
        if page in self._key_of:
            raise ValueError(f"page {page} is in the prefix index under another key")
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def discard(self, page: int) -> None:
        """Forget a page, if it is here."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def clear(self) -> None:
        self._page_of.clear()
        self._key_of.clear()

    def longest_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of known keys from the first on; `keys` is a chain, in order of position."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def problems(self) -> list[str]:
        """What is wrong with the maps, for `PageAllocator.audit`; empty when all is well."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            return ["the prefix index's two maps are not each other's inverse"]
        return []

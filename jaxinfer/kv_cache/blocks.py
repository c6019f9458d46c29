"""The page books: which page of the KV pool is free, cached or in use. The bytes themselves live in `pool.py`.

A page is always in exactly one state:

- in use: its reference count is at least 1;
- cached: nobody refers to it, but the prefix index knows its content, so that a later prompt may;
- free: neither.

Page 0 is the null page: padding is written there and nobody owns it. Usable pages are 1 to `num_pages`.

Plain host state: no JAX, no locks; the engine's loop thread owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.kv_cache.prefix import PrefixIndex

NULL_PAGE = 0


class PageAllocator:
    """Free list, reference counts, and the cached pages in order of last use.

    Attributes:
      num_pages: usable pages; `num_free + num_cached + num_in_use` is always this.
      ref_counts: how many holders each page id has; read only.
      index: the prefix index over full pages; change it through `register` and `forget_all` alone.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.ref_counts = [0] * (num_pages + 1)
        self.index = PrefixIndex()
        self._free = list(range(num_pages, 0, -1))  # a stack: page 1 goes out first
        self._cached: dict[int, None] = {}  # an ordered set, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones, and cached ones by evicting them."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each: free ones first, then the least recently used cached.

        Raises:
          ValueError: fewer than `count` are available; nothing was changed. Ask `num_available` before.
        """
        if count > self.num_available:
            raise ValueError(f"{count} pages asked for, {self.num_available} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page = next(iter(self._cached))
                del self._cached[page]
                self.index.discard(page)
            self.ref_counts[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page, which must be in use or cached."""
        for page in pages:
            if self.ref_counts[page] == 0:
                del self._cached[page]  # KeyError: a free page has no content to share
            self.ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's pages, given in order of position.

        A page nobody holds any more becomes cached if the prefix index knows it, else free. The last positions
        count as used longest ago, so that a chain is evicted from its tail and stays findable from its root.

        Raises:
          ValueError: a page has no reference to drop.
        """
        for page in reversed(pages):
            count = self.ref_counts[page] - 1
            if count < 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            self.ref_counts[page] = count
            if count == 0:
                if page in self.index:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, key: bytes) -> bool:
        """Let others find a full, computed page that is in use. From now on nobody may write to it.

        Returns False if another page of the same content is known already; the first one stays.

        Raises:
          ValueError: the page is not in use, or is known under another key.
        """
        if self.ref_counts[page] == 0:
            raise ValueError(f"page {page} is registered while nobody holds it")
        return self.index.add(key, page)

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix of a chain of keys. Takes no references: `share` them before all else."""
        return self.index.longest_prefix(keys)

    def forget_all(self) -> None:
        """Empty the prefix index (the pool's content was lost): cached pages become free, those in use stay so."""
        self.index.clear()
        self._free.extend(reversed(self._cached))
        self._cached.clear()

    def audit(self, holders: Iterable[Iterable[int]]) -> None:
        """Check every invariant against the page lists of all live holders.

        Raises:
          JaxinferError: says all that is wrong. Costs a walk over every page: for tests and for idle moments.
        """
        problems = self.index.problems()
        held = Counter(page for pages in holders for page in pages)
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            problems.append("a page is in the free list twice")
        if held[NULL_PAGE] or self.ref_counts[NULL_PAGE] or NULL_PAGE in free | cached or NULL_PAGE in self.index:
            problems.append("the null page is owned")
        for page in range(1, self.num_pages + 1):
            count, known = self.ref_counts[page], page in self.index
            if count != held[page]:
                problems.append(f"page {page} has {count} references and {held[page]} holders")
            state = "in use" if count else "cached" if known else "free"
            if (page in free, page in cached) != (state == "free", state == "cached"):
                problems.append(f"page {page} should be {state}: free {page in free}, cached {page in cached}")
        if problems:
            raise JaxinferError("page books are wrong: " + "; ".join(problems))

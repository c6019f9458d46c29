"""The page books and the prefix index, driven at random beside a model too plain to be wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.kv_cache.blocks import PageAllocator
from jaxinfer.kv_cache.prefix import page_key, root_key

CONTENTS = st.integers(0, 2)
PICK = st.integers(0, 1000)


class PageBooksMachine(RuleBasedStateMachine):
    """Model: what each holder holds, what content each known page has, and the cached pages in order of use.

    A holder is a list of pages. A content is the tuple of all page contents up to it, as a prefix is.
    """

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages) -> None:
        self.num_pages = num_pages
        self.books = PageAllocator(num_pages)
        self.holders: list[list[int]] = []
        self.contents: list[list[int]] = []  # of each holder's pages
        self.known: dict[tuple[int, ...], int] = {}
        self.cached: list[int] = []  # least recently used first

    def keys(self, contents: list[int]) -> list[bytes]:
        keys, parent = [], root_key()
        for content in contents:
            parent = page_key(parent, bytes([content]))
            keys.append(parent)
        return keys

    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    def num_free(self) -> int:
        return self.num_pages - len(self.held()) - len(self.cached)

    def drop(self, page: int) -> None:
        """In the model: a holder has let go of a page."""
        if self.held()[page] == 0 and page in self.known.values():
            self.cached.append(page)

    def take(self, count: int) -> list[int]:
        """Allocate in both, and compare which pages had to be evicted."""
        evicted = self.cached[: max(count - self.num_free(), 0)]
        pages = self.books.allocate(count)
        assert len(set(pages)) == count
        assert set(evicted) == set(pages) & set(self.cached)
        assert not set(pages) & set(self.held())
        self.cached = self.cached[len(evicted) :]
        self.known = {content: page for content, page in self.known.items() if page not in evicted}
        return pages

    @rule(count=st.integers(1, 4), contents=st.lists(CONTENTS, min_size=4, max_size=4))
    def allocate(self, count, contents) -> None:
        if count > self.num_free() + len(self.cached):
            with pytest.raises(ValueError):
                self.books.allocate(count)
            return
        self.holders.append(self.take(count))
        self.contents.append(contents[:count])

    @rule(contents=st.lists(CONTENTS, min_size=1, max_size=5))
    def lookup_and_share(self, contents) -> None:
        """A new sequence takes the longest known prefix."""
        expected = []
        for end in range(1, len(contents) + 1):
            page = self.known.get(tuple(contents[:end]))
            if page is None:
                break
            expected.append(page)
        pages = self.books.lookup(self.keys(contents))
        assert pages == expected
        if pages:
            self.books.share(pages)
            self.cached = [page for page in self.cached if page not in pages]
            self.holders.append(pages)
            self.contents.append(contents[: len(pages)])

    @rule(which=PICK)
    @precondition(lambda self: self.holders)
    def fork(self, which) -> None:
        which %= len(self.holders)
        self.books.share(self.holders[which])
        self.holders.append(list(self.holders[which]))
        self.contents.append(list(self.contents[which]))

    @rule(which=PICK, content=CONTENTS)
    @precondition(lambda self: self.holders)
    def grow(self, which, content) -> None:
        which %= len(self.holders)
        if self.books.num_available:
            self.holders[which].extend(self.take(1))
            self.contents[which].append(content)

    @rule(which=PICK, content=CONTENTS)
    @precondition(lambda self: self.holders)
    def copy_on_write(self, which, content) -> None:
        """A holder writes into its last page, after taking one of its own if others hold it or may find it."""
        which %= len(self.holders)
        pages = self.holders[which]
        page = pages[-1]
        if self.held()[page] > 1 or page in self.known.values():
            if not self.books.num_available:
                return
            [pages[-1]] = self.take(1)
            self.books.release([page])
            self.drop(page)
        self.contents[which][-1] = content

    @rule(which=PICK)
    @precondition(lambda self: self.holders)
    def register(self, which) -> None:
        """All pages of a holder are full and computed."""
        which %= len(self.holders)
        pages, contents = self.holders[which], self.contents[which]
        for number, (page, key) in enumerate(zip(pages, self.keys(contents), strict=True)):
            content = tuple(contents[: number + 1])
            if page in self.known.values():
                continue
            assert self.books.register(page, key) is (content not in self.known)
            self.known.setdefault(content, page)

    @rule(which=PICK)
    @precondition(lambda self: self.holders)
    def release(self, which) -> None:
        which %= len(self.holders)
        pages = self.holders.pop(which)
        self.contents.pop(which)
        self.books.release(pages)
        for page in reversed(pages):
            self.drop(page)

    @rule()
    def forget_all(self) -> None:
        self.books.forget_all()
        self.known, self.cached = {}, []

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "books"):
            return
        held = self.held()
        self.books.audit(self.holders)
        assert self.books.ref_counts == [held[page] for page in range(self.num_pages + 1)]
        assert list(self.books._cached) == self.cached
        assert self.books.num_free == self.num_free()
        assert self.books.num_cached == len(self.cached)
        assert self.books.num_in_use == len(held)
        assert len(self.books.index) == len(self.known)

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        for pages in self.holders:
            self.books.release(pages)
        self.books.audit([])
        assert self.books.num_free + self.books.num_cached == self.num_pages


TestPageBooks = PageBooksMachine.TestCase
TestPageBooks.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)

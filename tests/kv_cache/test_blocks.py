from __future__ import annotations

import pytest

from jaxinfer.errors import JaxinferError
from jaxinfer.kv_cache.blocks import NULL_PAGE, PageAllocator


def counts(pages: PageAllocator) -> tuple[int, int, int]:
    return pages.num_free, pages.num_cached, pages.num_in_use


def test_null_page_is_never_handed_out() -> None:
    pages = PageAllocator(3)
    assert counts(pages) == (3, 0, 0)
    assert sorted(pages.allocate(3)) == [1, 2, 3]
    assert NULL_PAGE == 0
    assert counts(pages) == (0, 0, 3)


def test_too_many_pages_change_nothing() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 available"):
        pages.allocate(2)
    pages.audit([held])


def test_released_pages_are_cached_if_known_and_free_if_not() -> None:
    pages = PageAllocator(4)
    known, unknown = pages.allocate(2)
    pages.register(known, b"k")
    pages.release([known, unknown])
    assert counts(pages) == (3, 1, 0)
    assert pages.lookup([b"k"]) == [known]
    pages.audit([])


def test_shared_page_lives_until_its_last_holder() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.share(held)
    pages.release(held)
    assert counts(pages) == (1, 0, 1)
    pages.audit([held])
    pages.release(held)
    assert counts(pages) == (2, 0, 0)


def test_sharing_a_cached_page_takes_it_back_into_use() -> None:
    pages = PageAllocator(1)
    held = pages.allocate(1)
    pages.register(held[0], b"k")
    pages.release(held)
    pages.share(held)
    assert counts(pages) == (0, 0, 1)
    with pytest.raises(ValueError):
        pages.allocate(1)


def test_free_pages_go_out_before_cached_ones_and_those_least_recently_used_first() -> None:
    pages = PageAllocator(4)
    chains = [pages.allocate(1) for _ in range(3)]
    for chain, key in zip(chains, (b"a", b"b", b"c"), strict=True):
        pages.register(chain[0], key)
        pages.release(chain)
    pages.share(chains[0])  # "a" is used again
    pages.release(chains[0])
    assert pages.allocate(1) == [4]
    assert pages.num_cached == 3
    assert pages.allocate(2) == [chains[1][0], chains[2][0]]
    assert pages.lookup([b"b"]) == pages.lookup([b"c"]) == []
    assert pages.lookup([b"a"]) == chains[0]


def test_a_chain_is_evicted_from_its_tail() -> None:
    pages = PageAllocator(3)
    chain = pages.allocate(3)
    keys = [b"0", b"1", b"2"]
    for page, key in zip(chain, keys, strict=True):
        pages.register(page, key)
    pages.release(chain)
    for left in (2, 1, 0):
        pages.allocate(1)
        assert pages.lookup(keys) == chain[:left]


def test_forgetting_all_frees_cached_pages_and_leaves_those_in_use() -> None:
    pages = PageAllocator(3)
    held, cached = pages.allocate(1), pages.allocate(1)
    pages.register(held[0], b"h")
    pages.register(cached[0], b"c")
    pages.release(cached)
    pages.forget_all()
    assert counts(pages) == (2, 0, 1)
    assert pages.lookup([b"h"]) == []
    pages.release(held)
    assert counts(pages) == (3, 0, 0)
    pages.audit([])


def test_misuse_is_refused() -> None:
    pages = PageAllocator(2)
    [page] = pages.allocate(1)
    pages.release([page])
    with pytest.raises(ValueError, match=f"page {page}"):
        pages.release([page])
    with pytest.raises(ValueError, match=f"page {page}"):
        pages.register(page, b"k")
    with pytest.raises(KeyError):
        pages.share([page])
    pages.audit([])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pages, page: pages.ref_counts.__setitem__(page, 2), "2 references and 1 holders"),
        (lambda pages, page: pages._free.append(page), "should be in use"),
        (lambda pages, page: pages._free.append(pages._free[0]), "free list twice"),
        (lambda pages, page: pages._free.pop(), "should be free"),
        (lambda pages, page: pages._cached.__setitem__(page, None), "should be in use"),
        (lambda pages, page: pages.index.add(b"k", pages._free[0]), "should be cached"),
        (lambda pages, page: pages._free.append(NULL_PAGE), "null page"),
        (lambda pages, page: pages.index._page_of.__setitem__(b"k", page), "inverse"),
    ],
)
def test_audit_sees_damage(damage, message) -> None:
    pages = PageAllocator(3)
    held = pages.allocate(1)
    pages.audit([held])
    damage(pages, held[0])
    with pytest.raises(JaxinferError, match=message):
        pages.audit([held])

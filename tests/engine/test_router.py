"""Which replica a request goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.router import Router

OPEN = (False, False)


def router(**changes: int) -> Router:
    return Router(**{"num_replicas": 2, "page_size": 4, "pages": 8, "slots": 4} | changes)  # type: ignore[arg-type]


def test_new_prompts_go_where_least_runs():
    r = router()
    assert [r.choose([i] * 6, 1, closed=OPEN) for i in range(4)] == [0, 1, 0, 1]
    r.ended(1, 1)
    assert r.choose([9] * 6, 1, closed=OPEN) == 1


def test_a_prefix_goes_where_it_was_sent():
    r = router()
    prefix = list(range(8))
    assert r.choose([*prefix, 70], 1, closed=OPEN) == 0
    assert r.choose([50] * 9, 1, closed=OPEN) == 1
    # Though replica 0 has as much to do; what does not fill a page is no prefix.
    assert r.choose([*prefix, 71], 1, closed=OPEN) == 0
    assert r.choose([0, 1, 2], 1, closed=OPEN) == 1


def test_the_longest_prefix_wins():
    r = router()
    r.choose(list(range(8)), 1, closed=OPEN)
    r.choose([*range(4), 90, 91, 92, 93, *range(4)], 1, closed=(True, False))
    assert r.choose([*range(4), 90, 91, 92, 93, 5], 1, closed=OPEN) == 1
    assert r.choose(list(range(9)), 1, closed=OPEN) == 0


def test_a_full_replica_is_passed_over():
    r = router()
    prefix = list(range(8))
    assert [r.choose(prefix, 2, closed=OPEN) for _ in range(3)] == [0, 0, 1]
    # Both are full: the one with least waits.
    r.choose([60] * 8, 2, closed=OPEN)
    assert r.loads == [4, 4]
    assert r.choose(prefix, 3, closed=OPEN) == 0
    assert r.choose(prefix, 1, closed=OPEN) == 1


def test_one_that_hangs_is_passed_over():
    r = router()
    prefix = list(range(8))
    assert r.choose(prefix, 1, closed=OPEN) == 0
    assert r.choose(prefix, 1, closed=(True, False)) == 1
    assert r.choose([1], 1, closed=(True, True)) == 0


def test_what_was_sent_long_ago_is_forgotten():
    r = router(pages=2)
    r.choose(list(range(8)), 1, closed=OPEN)
    r.choose([50] * 8, 1, closed=(False, True))
    r.ended(0, 1)
    assert r.choose([60] * 8, 1, closed=OPEN) == 1
    r.ended(0, 1)
    r.ended(1, 1)
    # Nobody holds the first prompt any more: by load alone.
    r.choose([70] * 3, 1, closed=(False, True))
    assert r.choose(list(range(8)), 1, closed=OPEN) == 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 3)), max_size=30))
def test_loads_are_what_was_sent_and_has_not_ended(sent: list[tuple[list[int], int]]):
    r = router(num_replicas=3)
    chosen = [(r.choose(prompt, n, closed=(False,) * 3), n) for prompt, n in sent]
    assert sum(r.loads) == sum(n for _, n in chosen)
    for replica, n in chosen:
        r.ended(replica, n)
    assert r.loads == [0, 0, 0]

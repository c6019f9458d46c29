from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.kv_cache.prefix import DIGEST_BYTES, PrefixIndex, page_key, root_key


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def test_keys_depend_on_tokens_parent_and_namespace() -> None:
    root = root_key(b"bf16")
    keys = [
        page_key(root, tokens(1, 2)),
        page_key(root, tokens(2, 1)),
        page_key(root, tokens(1, 2, 3)),
        page_key(root_key(b"int8"), tokens(1, 2)),
        page_key(page_key(root, tokens(1, 2)), tokens(1, 2)),
        page_key(root_key(), tokens(1, 2)),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == DIGEST_BYTES == 16 for key in keys)
    assert page_key(root, memoryview(tokens(1, 2))) == keys[0]


def test_keys_are_the_same_in_every_process() -> None:
    # Unlike Python's hash(), which is salted per process.
    assert page_key(root_key(b"x"), tokens(1, 2, 3, 4)).hex() == "90ab3546c1f953098fe6e2e445c4be90"


def test_longest_prefix_stops_at_the_first_gap() -> None:
    index = PrefixIndex()
    a, b, c = b"a", b"b", b"c"
    index.add(a, 5)
    index.add(c, 7)
    assert index.longest_prefix([a, b, c]) == [5]
    index.add(b, 6)
    assert index.longest_prefix([a, b, c]) == [5, 6, 7]
    assert index.longest_prefix([b"z", a]) == []
    assert index.longest_prefix([]) == []


def test_first_page_of_a_content_stays() -> None:
    index = PrefixIndex()
    assert index.add(b"a", 1)
    assert not index.add(b"a", 2)
    assert 2 not in index
    assert index.longest_prefix([b"a"]) == [1]
    index.discard(2)
    assert index.longest_prefix([b"a"]) == [1]
    index.discard(1)
    assert len(index) == 0
    assert index.add(b"a", 2)


def test_a_page_has_one_key() -> None:
    index = PrefixIndex()
    index.add(b"a", 1)
    with pytest.raises(ValueError, match="page 1"):
        index.add(b"b", 1)
    assert index.problems() == []

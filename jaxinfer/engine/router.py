"""Which replica serves a request: one with room that holds most of its prompt, else the one with least to do."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxinfer.kv_cache.prefix import page_key, root_key


class Router:
    """Remembers what each replica was sent. Threads may share it. It knows no JAX.

    What a replica was sent last is what it most likely still holds, or is about to: two requests with one new prefix go
    to the same replica even before the first of them is computed. A wrong guess costs a prompt computed again.

    Args:
      pages: how many pages a replica remembers: as many as its pool has.
      slots: how many sequences run at once in a replica.
    """

    def __init__(self, num_replicas: int, *, page_size: int, pages: int, slots: int):
        self._page_size, self._pages, self._slots = page_size, pages, slots
        self._lock = threading.Lock()
        self._sent = [OrderedDict[bytes, None]() for _ in range(num_replicas)]
        self.loads = [0] * num_replicas  # sequences that were sent and have not ended

    def choose(self, prompt: Sequence[int] | np.ndarray, num_sequences: int, *, closed: Sequence[bool]) -> int:
        """The replica for a prompt; it has so many sequences more from now on, until `ended`.

        Args:
          closed: of each replica, whether to pass it over, as when it hangs; all of them closed is as none.
        """
        keys = self._keys(prompt) if len(self.loads) > 1 else []
        with self._lock:
            open_ = [i for i, shut in enumerate(closed) if not shut] or list(range(len(self.loads)))
            room = [i for i in open_ if self.loads[i] + num_sequences <= self._slots]
            held = {i: self._held(self._sent[i], keys) if room else 0 for i in room or open_}
            chosen = min(held, key=lambda i: (-held[i], self.loads[i]))
            self.loads[chosen] += num_sequences
            sent = self._sent[chosen]
            for key in keys:
                sent[key] = None
                sent.move_to_end(key)
            while len(sent) > self._pages:
                sent.popitem(last=False)
            return chosen

    def ended(self, replica: int, num_sequences: int) -> None:
        with self._lock:
            self.loads[replica] -= num_sequences

    def _keys(self, prompt: Sequence[int] | np.ndarray) -> list[bytes]:
        ids, keys = np.asarray(prompt, np.int32), [root_key()]
        for end in range(self._page_size, min(len(ids), self._pages * self._page_size) + 1, self._page_size):
            keys.append(page_key(keys[-1], ids[end - self._page_size : end].tobytes()))
        return keys[1:]

    @staticmethod
    def _held(sent: OrderedDict[bytes, None], keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in sent), len(keys))

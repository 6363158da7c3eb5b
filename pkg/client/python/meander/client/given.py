"""Tensors that one thread gives while another stores them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

Pair = tuple[str, Any]
"""A tensor with its name."""


class Given:
    """Pairs of a state dict, for push_weights to take in another thread: at most one is held between the two."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pair: Pair | None = None
        self._ended = self._left = False

    def give(self, pair: Pair) -> None:
        """Waits until the pair before is taken. What nobody takes any more is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._pair is None or self._left)
            self._pair = None if self._left else pair
            self._changed.notify_all()

    def end(self) -> None:
        """Says that no more pairs come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def leave(self, _: Any = None) -> None:
        """Says that nobody takes pairs any more, as the push is over: it may be called back with its task."""
        with self._changed:
            self._left, self._pair = True, None
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Pair]:
        while (pair := self._take()) is not None:
            yield pair
            del pair

    def _take(self) -> Pair | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pair is not None or self._ended)
            pair, self._pair = self._pair, None
            self._changed.notify_all()
            return pair

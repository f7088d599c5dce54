"""Which worker holds which prefix: what workers say they have cached, and what they were sent since.

Pure and bounded; keyed by the truncated block hashes of admission entries. A worker that says nothing is judged by what
it was sent, the longest unused forgotten first. Written by the registry and the claim loop, read by the policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

MAX_SENT_HASHES = 262_144
# A worker that reports its cache shows within this time what it was sent; later the report alone counts.
UNREPORTED_S = 10.0


class PrefixIndex:
    """Hash → workers, twice: reported by them, and guessed from what they were sent."""

    def __init__(self, *, max_sent_hashes: int = MAX_SENT_HASHES) -> None:
        """`max_sent_hashes` bounds the guesses; reports are bounded by the workers' own block pools."""
        self._max_sent_hashes = max_sent_hashes
        self._sent: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._reported: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Hashes that are guessed."""
        return len(self._sent)

    def sent(self, instance: str, block_hashes: Iterable[int], now: float) -> None:
        """The worker is about to compute these blocks."""
        for block in block_hashes:
            self._sent.setdefault(block, {})[instance] = now
            self._sent.move_to_end(block)
        while len(self._sent) > self._max_sent_hashes:
            self._sent.popitem(last=False)

    def replace(self, instance: str, block_hashes: Iterable[int]) -> None:
        """All that the worker has cached now."""
        self._reported[instance] = set(block_hashes)

    def change(self, instance: str, *, stored: Iterable[int], removed: Collection[int]) -> None:
        """What the worker cached and evicted since its last report."""
        held = self._reported.setdefault(instance, set())
        held.difference_update(removed)
        held.update(stored)
        for block in removed:
            self._unsend(block, instance)

    def unreported(self, instance: str) -> None:
        """The worker's reports broke off: until its next one only what it is sent counts."""
        self._reported.pop(instance, None)

    def forget(self, instance: str) -> None:
        """The worker has left."""
        self.unreported(instance)
        for block in [block for block, workers in self._sent.items() if instance in workers]:
            self._unsend(block, instance)

    def holders(self, block: int, now: float) -> list[str]:
        """Workers that have this block."""
        reported = [instance for instance, held in self._reported.items() if block in held]
        return reported + [i for i in self._sent.get(block, ()) if i not in reported and self._has(i, block, now)]

    def leading(self, instance: str, block_hashes: Sequence[int], now: float) -> int:
        """How many of the first blocks the worker has, by bisection: hashes are chained and ends evicted first."""
        low, high = 0, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            if self._has(instance, block_hashes[middle], now):
                low = middle + 1
            else:
                high = middle
        return low

    def _has(self, instance: str, block: int, now: float) -> bool:
        reported = self._reported.get(instance)
        if reported is not None and block in reported:
            return True
        sent_at = self._sent.get(block, {}).get(instance)
        return sent_at is not None and (reported is None or now - sent_at <= UNREPORTED_S)

    def _unsend(self, block: int, instance: str) -> None:
        workers = self._sent.get(block)
        if workers is not None:
            workers.pop(instance, None)
            if not workers:
                del self._sent[block]

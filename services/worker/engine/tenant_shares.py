"""Caps and reservations of tenants over one countable thing: blocks, or slots of the batch.

Pure arithmetic over counts it is given; holds no counts itself. Called by the KV cache manager and the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Room(NamedTuple):
    """`by_tenant`: left under the tenant's own cap. `by_pool`: left after what others have reserved and not used."""

    by_tenant: int
    by_pool: int

    @property
    def total(self) -> int:
        return min(self.by_tenant, self.by_pool)


class TenantShares:
    """Shares of `total`; `reserved` lists only tenants with a reservation, `cap_of` answers None for no cap."""

    def __init__(self, total: int, *, reserved: Mapping[str, int], cap_of: Callable[[str], int | None]) -> None:
        self._total = total
        self._reserved = {tenant: count for tenant, count in reserved.items() if count}
        self._cap_of = cap_of

    def limit(self, tenant: str) -> int:
        """The most `tenant` could hold if nobody else held anything."""
        others = sum(count for other, count in self._reserved.items() if other != tenant)
        cap = self._cap_of(tenant)
        return self._total - others if cap is None else min(cap, self._total - others)

    def room(self, tenant: str, *, available: int, held_by: Callable[[str], int]) -> Room:
        """What `tenant` may take now, of `available`, given what each tenant holds."""
        for other, count in self._reserved.items():
            if other != tenant:
                available -= max(0, count - held_by(other))
        cap = self._cap_of(tenant)
        return Room(self._total if cap is None else cap - held_by(tenant), available)

    def has_room(self, tenant: str, count: int, *, available: int, held_by: Callable[[str], int]) -> bool:
        """`room(…).total >= count`, at once where nobody has reserved anything and the tenant has no cap."""
        if not self._reserved and self._cap_of(tenant) is None:
            return available >= count
        return self.room(tenant, available=available, held_by=held_by).total >= count

    def within_reservation(self, tenant: str, *, held: int) -> bool:
        """True when what the tenant gives back would only refill its own reservation."""
        return held <= self._reserved.get(tenant, 0)

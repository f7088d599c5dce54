"""Caps and reservations of tenants: the quick question has the answer of the whole sum."""

from __future__ import annotations

import itertools

import pytest

from services.worker.engine.tenant_shares import TenantShares

HELD = {"a": 2, "b": 1}


@pytest.mark.parametrize("reserved", [{}, {"b": 3}, {"a": 1, "b": 2}], ids=str)
@pytest.mark.parametrize("cap", [None, 2, 4])
def test_there_is_room_for_what_the_sum_leaves(reserved: dict[str, int], cap: int | None) -> None:
    shares = TenantShares(8, reserved=reserved, cap_of=lambda tenant: cap if tenant == "a" else None)

    for tenant, count, available in itertools.product("abc", range(7), range(6)):
        left = shares.room(tenant, available=available, held_by=lambda each: HELD.get(each, 0)).total
        assert shares.has_room(tenant, count, available=available, held_by=lambda each: HELD.get(each, 0)) == (
            left >= count
        ), (tenant, count, available, left)

"""Which workers may take a request at all, room aside. Each filter is one pure predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from millrace.common.v1 import common_pb2

from services.router.endpoint import Endpoint, Needs, View

Filter = Callable[[Needs, View], bool]
_DECODING: Final = (common_pb2.WORKER_ROLE_AGGREGATED, common_pb2.WORKER_ROLE_DECODE)


def serves_version(needs: Needs, view: View) -> bool:
    """The very version that the gateway tokenised for."""
    return (needs.model, needs.version) == (view.model.model, view.model.version)


def can_decode(needs: Needs, view: View) -> bool:
    """Not a worker that only prefills."""
    return view.role in _DECODING


def only_prefills(endpoint: Endpoint) -> bool:
    """A worker that takes no Submit; by its record as long as it was not heard."""
    view = endpoint.view
    return endpoint.record.role == "prefill" if view is None else view.role == common_pb2.WORKER_ROLE_PREFILL


def is_attached(needs: Needs, view: View) -> bool:
    """The request's gateway listens to this worker."""
    return needs.gateway_instance in view.attached_gateways


def has_adapter(needs: Needs, view: View) -> bool:
    """The adapter is loaded, where one is asked for."""
    return not needs.adapter or needs.adapter in view.adapters


def is_routable(endpoint: Endpoint, now: float) -> bool:
    """The view is fresh and the worker is ready."""
    view = endpoint.view
    return view is not None and view.ready and not view.draining and endpoint.fresh(now)


def ejected(pool: Iterable[Endpoint], now: float) -> frozenset[str]:
    """Workers that their breaker keeps out: half of those alive at most, of those that decode and of those that only
    prefill. Where more fail the cause lies elsewhere, and none is kept out, so that what works at all is spread over
    all."""
    alive = [endpoint for endpoint in pool if endpoint.fresh(now)]
    out: set[str] = set()
    for prefills in (False, True):
        kind = [endpoint for endpoint in alive if only_prefills(endpoint) is prefills]
        shut = {endpoint.instance for endpoint in kind if not endpoint.open(now)}
        if 2 * len(shut) <= len(kind):
            out |= shut
    return frozenset(out)


def eligible(needs: Needs, endpoint: Endpoint, now: float) -> bool:
    """Routable, and every filter agrees."""
    view = endpoint.view
    if view is None or not is_routable(endpoint, now):
        return False
    return (
        serves_version(needs, view)
        and can_decode(needs, view)
        and is_attached(needs, view)
        and has_adapter(needs, view)
    )

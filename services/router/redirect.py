"""What becomes of a claim whose version was withdrawn, or has no worker: it goes to another version of its route.

Where that version makes the same tokens of a prompt, the entry is re-targeted here; else it leaves the queue, and its
gateway chooses and tokenises again. Work that has produced tokens is never moved. Pure; called by the claim loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from services.common.routes import RouteTable, Target
from services.router.dispatcher import HeldClaim
from services.router.endpoint import Needs, View
from services.router.filters import is_routable
from services.router.roster import Roster

# A version without a worker may only have restarted one.
PATIENCE_S = 2.0


class Redirect:
    """Decides by the table in force."""

    def __init__(self, routes: Callable[[], RouteTable]) -> None:
        self._routes = routes

    def closes(self, held: HeldClaim, roster: Roster, now: float) -> bool:
        """True when the claim cannot run as it is. Re-targets its entry where that is possible."""
        entry, routes = held.claim.entry, self._routes()
        if not routes.withdrawn and now - held.since <= PATIENCE_S:
            return False
        own = Target(entry.model.model, entry.model.version)
        withdrawn = own in routes.withdrawn
        if not withdrawn and (entry.prefix or now - held.since <= PATIENCE_S):
            return False
        if not withdrawn and roster.load(held.needs).count:
            return False
        served = {
            Target(e.view.model.model, e.view.model.version): e.view
            for e in roster.endpoints
            if e.view is not None and is_routable(e, now)
        }
        if entry.prefix:
            return own not in served
        if not withdrawn and own in served:
            return False
        if entry.route not in routes.routes:
            return withdrawn
        chosen = routes.pick(
            entry.route, tenant=entry.tenant, key=entry.request_id, usable=lambda t: t in served and t != own
        )
        if chosen is None:
            return withdrawn
        return not _retargeted(held, served[chosen])


def _retargeted(held: HeldClaim, view: View) -> bool:
    entry = held.claim.entry
    if not entry.prompt_digest or entry.prompt_digest != view.prompt_digest:
        return False
    entry.model.CopyFrom(view.model)
    # They are of the other version's blocks.
    del entry.block_hashes[:]
    held.claim = dataclasses.replace(held.claim, entry_bytes=entry.SerializeToString())
    held.needs = Needs.of(entry)
    held.excluded.clear()
    return True

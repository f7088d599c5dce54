"""Who may be rolled out: a version whose signed release says that it was evaluated, or one that somebody forces.

Pure; trusts nothing but the keys it was given. Called where a rollout is started or promoted by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from services.common.errors import InvalidRequest
from services.common.release import ReleaseError, parse_keys, parse_release
from services.common.routes import RouteTable, Target

FORCED = "forced without an evaluated release: "


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What came with the call: the file of a release, empty for none, and whether it is to go without."""

    release: bytes = b""
    force: bool = False


def check_keys(text: str) -> str:
    """The text. Raises ValueError unless it is public keys."""
    parse_keys(text)
    return text


def reason(ask: Ask, why: str) -> str:
    """What the history says. Raises InvalidRequest for force without a reason."""
    if not ask.force:
        return why
    if not why.strip():
        raise InvalidRequest("force needs a reason: say why.", param="why")
    return FORCED + why


class ReleaseGate:
    """Holds the public keys that releases may be signed with."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = keys

    def passed(self, table: RouteTable, alias: str, ask: Ask) -> RouteTable:
        """The table with the release noted in the rollout of `alias`. Raises InvalidRequest for a rollout that has
        shown no release and is not forced, and for a file that is no release of its candidate, forced or not."""
        route = table.routes[alias]
        rollout = route.rollout
        if rollout is None:
            raise InvalidRequest(f"There is no rollout of `{alias}`.", param="alias")
        if ask.release:
            digest = self._digest(ask, rollout.candidate) or rollout.release_digest
            route = dataclasses.replace(route, rollout=dataclasses.replace(rollout, release_digest=digest))
        elif not rollout.release_digest and not ask.force:
            text = f"No release of {rollout.candidate} was shown: give one that was evaluated, or force it."
            raise InvalidRequest(text, param="release")
        return dataclasses.replace(table, routes={**table.routes, alias: route})

    def _digest(self, ask: Ask, candidate: Target) -> bytes:
        """Empty for a release that lacks something and is forced."""
        try:
            release = parse_release(ask.release)
            release.check(self._keys)
        except ReleaseError as error:
            raise InvalidRequest(f"The release is refused: {error}.", param="release") from None
        manifest = release.manifest
        released = Target(manifest.pins.model, manifest.pins.version)
        if released != candidate:
            raise InvalidRequest(f"The release is of {released}, not of {candidate}.", param="release")
        if not manifest.missing:
            return manifest.digest
        if ask.force:
            return b""
        reasons = " and ".join(manifest.missing)
        raise InvalidRequest(f"The release of {candidate} cannot be rolled out unforced: {reasons}.", param="release")

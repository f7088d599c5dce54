"""Who may be rolled out: a version whose signed release says that it was evaluated, or one that somebody forces.

Pure; trusts nothing but the keys it was given. Called where a rollout is started or promoted by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from services.common.admission_types import WorkerRecord
from services.common.errors import InvalidRequest
from services.common.release import ReleaseError, parse_keys, parse_release
from services.common.routes import Rollout, RouteTable, Target

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


def serve_another(rollout: Rollout, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Workers of the candidate that say they serve something else than the release that was shown."""
    candidate, shown = rollout.candidate, rollout.release_digest.hex()
    return [w for w in workers if Target(w.model, w.version) == candidate and shown and w.digest and w.digest != shown]


class ReleaseGate:
    """Holds the public keys that releases may be signed with."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = keys

    def passed(self, table: RouteTable, alias: str, ask: Ask, workers: Sequence[WorkerRecord]) -> RouteTable:
        """The table with the release noted in the rollout of `alias`. Raises InvalidRequest for a rollout that has
        shown no release and is not forced, for one whose release is not what `workers` serve, unless forced, and for
        a file that is no release of its candidate, forced or not."""
        route = table.routes[alias]
        rollout = route.rollout
        if rollout is None:
            raise InvalidRequest(f"There is no rollout of `{alias}`.", param="alias")
        if ask.release:
            digest = self._digest(ask, rollout.candidate) or rollout.release_digest
            rollout = dataclasses.replace(rollout, release_digest=digest)
            route = dataclasses.replace(route, rollout=rollout)
        elif not rollout.release_digest and not ask.force:
            text = f"No release of {rollout.candidate} was shown: give one that was evaluated, or force it."
            raise InvalidRequest(text, param="release")
        if not ask.force and (others := serve_another(rollout, workers)):
            text = (
                f"{others[0].instance} serves {rollout.candidate} as {others[0].digest[:12]}, not as the release "
                f"{rollout.release_digest.hex()[:12]} that was shown: start it with that release, or force it."
            )
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

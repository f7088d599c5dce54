"""What a model's name stands for, as data: weighted versions, pins, shadows, pools, withdrawn versions; and the pick.

Pure. The gateway picks at admission, the router when a version was withdrawn; the usage service makes the next table.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from millrace.common.v1 import common_pb2


class Target(NamedTuple):
    """One version of a model."""

    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedTarget:
    """`weight` parts of the sum of a route's weights."""

    target: Target
    weight: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shadow:
    """A share (0 … 1) of the requests is mirrored to `target`."""

    target: Target
    share: float


class RolloutState(enum.Enum):
    """Where a rollout stands; the values are the wire's."""

    RUNNING = 1
    PAUSED = 2
    PROMOTED = 3
    ROLLED_BACK = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """A move from `baseline` to `candidate`. `step` is an index into `step_percents`, `step_time` in unix seconds.

    `criteria` are what the candidate must hold, by name. `release_digest` names the candidate's release where one that
    has everything asked for was shown; empty while the rollout was only forced.
    """

    baseline: Target
    candidate: Target
    step_percents: tuple[int, ...]
    step: int
    state: RolloutState
    bake_s: float
    step_time: float
    reason: str = ""
    criteria: Mapping[str, float] = dataclasses.field(default_factory=dict)
    release_digest: bytes = b""

    @property
    def percent(self) -> int:
        """The candidate's share of the traffic now."""
        return 0 if self.state is RolloutState.ROLLED_BACK else self.step_percents[self.step]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """What one name stands for. `pins` are by tenant."""

    alias: str
    targets: tuple[WeightedTarget, ...]
    pins: Mapping[str, Target] = dataclasses.field(default_factory=dict)
    shadow: Shadow | None = None
    rollout: Rollout | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolRule:
    """Sends what it matches to `pool`; empty and 0 match everything."""

    pool: str
    model: str = ""
    tenant: str = ""
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_UNSPECIFIED
    length_class: common_pb2.LengthClass.ValueType = common_pb2.LENGTH_CLASS_UNSPECIFIED


@dataclasses.dataclass(frozen=True, slots=True)
class RouteTable:
    """One revision of all routes; never changed, only replaced."""

    revision: int = 0
    routes: Mapping[str, Route] = dataclasses.field(default_factory=dict)
    pool_rules: tuple[PoolRule, ...] = ()
    withdrawn: frozenset[Target] = frozenset()

    def pick(self, alias: str, *, tenant: str, key: str | None, usable: Callable[[Target], bool]) -> Target | None:
        """The version for one request, or None when the route has nothing usable. Raises KeyError without a route.

        The same `key` (a session, else the request's id) gets the same version while the table stays, and keeps it
        where the share of the last target grows; without a key it is the version that most get. A pin is never replaced
        by weights, unless it is withdrawn. A version that is not usable gets nothing from weights: its requests are
        drawn again among the others.
        """
        route = self.routes[alias]
        pinned = route.pins.get(tenant)
        if pinned is not None and pinned not in self.withdrawn:
            return pinned if usable(pinned) else None
        left = [t for t in route.targets if t.weight > 0 and t.target not in self.withdrawn]
        point = None if key is None else _point(alias, key)
        while left:
            drawn = max(left, key=lambda t: t.weight) if point is None else _drawn(left, point)
            if usable(drawn.target):
                return drawn.target
            left.remove(drawn)
        return None

    def mirrored_to(self, alias: str, request_id: str) -> Target | None:
        """The version that this request of a route is mirrored to, or None; None without a route too."""
        route = self.routes.get(alias)
        if route is None or route.shadow is None or route.shadow.target in self.withdrawn:
            return None
        return route.shadow.target if _point(f"{alias}\0shadow", request_id) < route.shadow.share else None

    def pools(
        self,
        model: str,
        tenant: str,
        priority_class: common_pb2.PriorityClass.ValueType,
        length_class: common_pb2.LengthClass.ValueType,
    ) -> Iterator[str]:
        """Pools that the rules name for such a request, best first."""
        for rule in self.pool_rules:
            matches = (
                rule.model in ("", model)
                and rule.tenant in ("", tenant)
                and rule.priority_class in (common_pb2.PRIORITY_CLASS_UNSPECIFIED, priority_class)
                and rule.length_class in (common_pb2.LENGTH_CLASS_UNSPECIFIED, length_class)
            )
            if matches:
                yield rule.pool


def prompt_digest(tokenizer_digest: bytes, chat_template: str, *, add_bos: bool) -> bytes:
    """SHA-256 of what makes a prompt's token ids: two versions with the same one read the same ids alike."""
    parts = (tokenizer_digest, chat_template.encode(), bytes([add_bos]))
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def _point(alias: str, key: str) -> float:
    """A number in [0, 1) that depends on nothing but name and key."""
    digest = hashlib.blake2b(f"{alias}\0{key}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)


def _drawn(targets: list[WeightedTarget], point: float) -> WeightedTarget:
    at = point * sum(t.weight for t in targets)
    for weighted in targets:
        at -= weighted.weight
        if at < 0:
            return weighted
    return targets[-1]

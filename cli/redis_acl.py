"""Users of Redis, one a service, each with the keys it needs and no more; what `millrace up --tls` gives to Redis.

A tenant's slot and a pool's look alike to a pattern but for their last part, so patterns name that.
"""

from __future__ import annotations

from collections.abc import Mapping

# Redis' own INFO is "dangerous"; the age of the process and its role are what reapers and outboxes ask for.
_COMMANDS = "+@all -@admin -@dangerous +info"
_TENANT = ("live", "res", "budget*", "rpm*", "tin*", "tout*", "where:*")
_POOL = "~mr:{*/*/*}:*"
_REGISTRY = "~mr:{registry}:*"
_TENANTS = " ".join(f"~mr:{{*}}:{name}" for name in _TENANT)
_KEYS = "~mr:{keys}:*"
# Redis 6.2 cannot give a key for reading only: all but usage just read it.
_ROUTES = "~mr:{routes}:*"
_STREAMS = "~mr:{*}:stream:* ~mr:{*}:idem:* ~mr:{*}:batch_runner"
_LEDGER = "~mr:{*/*/*}:usage ~mr:{*/*/*}:committed ~mr:{*}:budget* ~mr:{*}:live"
RULES = {
    # Admits, reads keys, keeps answers that clients may come back for, leases batches; cancels travel by channel.
    "gateway": f"{_POOL} {_REGISTRY} {_TENANTS} {_STREAMS} {_KEYS} {_ROUTES} &*",
    # Claims and reaps: settles reservations, never sees a key.
    "router": f"{_POOL} {_REGISTRY} {_TENANTS} {_ROUTES} resetchannels",
    # Owns and finishes requests of its pool.
    "worker": f"{_POOL} {_REGISTRY} resetchannels",
    # Reads usage, says what is committed, writes keys, routes and what budgets have spent.
    "usage": f"{_LEDGER} {_REGISTRY} {_KEYS} {_ROUTES} resetchannels",
}


def acl_file(passwords: Mapping[str, str]) -> str:
    """Content of Redis' `aclfile`: the users of RULES by their passwords, and nobody else."""
    users = [f"user {name} on >{passwords[name]} {rules} {_COMMANDS}" for name, rules in RULES.items()]
    return "\n".join(["user default off", *users, ""])

"""What tenants may hold in this worker, as their newest requests say it. Written at Submit, read by the engine.

Owned by wiring. Only tenants with caps are in it.
"""

from __future__ import annotations

from millrace.common.v1 import admission_pb2

from services.worker.engine.engine_config import TenantLimits


class TenantCaps(dict[str, TenantLimits]):
    """Limits by tenant, the engine's `tenant_limits`: each change is one assignment, so no reader needs a lock."""

    def note(self, entry: admission_pb2.AdmissionEntry) -> None:
        """Take the caps that the entry carries; none frees the tenant of its caps."""
        slots = entry.tenant_slot_cap if entry.HasField("tenant_slot_cap") else None
        blocks = entry.tenant_block_cap if entry.HasField("tenant_block_cap") else None
        if (slots, blocks) == (None, None):
            self.pop(entry.tenant, None)
        else:
            self[entry.tenant] = TenantLimits(max_slots=slots, max_blocks=blocks)

"""The workers this gateway is attached to: one attachment each, made and dropped as the registry changes.

Losing a registry lease alone never closes a stream. Above 64 workers a rendezvous-hashed subset of 32 is dialled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import WorkerRecord
from services.common.clock import Clock
from services.common.grpc_client import Dial, open_channel
from services.gateway.tasks import Tasks
from services.gateway.worker_attach import AttachListener, WorkerAttachment

MAX_ATTACHED = 64
SUBSET_SIZE = 32


def attach_subset(gateway_instance: str, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Workers this gateway dials: all of them, or 32 chosen so that gateways spread and changes move few."""
    if len(records) <= MAX_ATTACHED:
        return list(records)

    def score(record: WorkerRecord) -> bytes:
        return hashlib.sha256(f"{gateway_instance}|{record.instance}".encode()).digest()

    return sorted(records, key=score)[:SUBSET_SIZE]


class WorkerPool:
    """Attachments by worker instance."""

    def __init__(
        self, gateway_instance: str, listener: AttachListener, clock: Clock, dial: Dial = open_channel
    ) -> None:
        self._gateway_instance = gateway_instance
        self._listener = listener
        self._clock = clock
        self._dial = dial
        self._attachments: dict[str, WorkerAttachment] = {}
        self._tasks = Tasks()

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """The registry's view, as often as it is read."""
        decoding = [record for record in records if record.role != "prefill"]
        wanted = {record.instance: record for record in attach_subset(self._gateway_instance, decoding)}
        addresses = {record.address: instance for instance, record in wanted.items()}
        for instance, attachment in self._attachments.items():
            attachment.listed = instance in wanted
            if not attachment.attached and addresses.get(attachment.record.address, instance) != instance:
                # Somebody else answers there: this incarnation is dead.
                attachment.give_up()
        for instance, record in wanted.items():
            if instance not in self._attachments:
                attachment = WorkerAttachment(record, self._gateway_instance, self._listener, self._clock, self._dial)
                self._attachments[instance] = attachment
                self._tasks.spawn(self._keep(attachment), name=f"attachment-{instance}")

    def serves(self, model: str, version: str) -> bool:
        """Some attached worker serves this version."""
        return any(
            a.attached and a.record.model == model and a.record.version == version for a in self._attachments.values()
        )

    def record(self, instance: str) -> WorkerRecord | None:
        """What the registry said of a worker that there is a stream to."""
        attachment = self._attachments.get(instance)
        return None if attachment is None else attachment.record

    def expects(self, instance: str) -> bool:
        """The worker is attached, or its stream broke less than 3 s ago."""
        attachment = self._attachments.get(instance)
        return attachment is not None and (attachment.attached or not attachment.given_up)

    def attached_instances(self) -> list[str]:
        """Workers with an open stream."""
        return [instance for instance, attachment in self._attachments.items() if attachment.attached]

    def cancel(self, instance: str, cancel: worker_service_pb2.Cancel) -> None:
        """Send a Cancel to a worker, where there is a stream to it."""
        attachment = self._attachments.get(instance)
        if attachment is not None:
            attachment.cancel(cancel)

    def acknowledge(self, instance: str, request_id: str) -> None:
        """Send an ack of a request to its worker at once."""
        attachment = self._attachments.get(instance)
        if attachment is not None:
            attachment.acknowledge(request_id)

    def confirm(self, instance: str, entry: worker_service_pb2.AckEntry) -> None:
        """Send the last ack of a request to its worker."""
        attachment = self._attachments.get(instance)
        if attachment is not None:
            attachment.confirm(entry)

    def reopen(self, instance: str) -> None:
        """Open the stream to a worker again, from what is held."""
        attachment = self._attachments.get(instance)
        if attachment is not None:
            attachment.reopen()

    async def close(self) -> None:
        """Drop every stream."""
        await self._tasks.close()

    async def _keep(self, attachment: WorkerAttachment) -> None:
        try:
            await attachment.run()
        finally:
            attachment.close()
            self._attachments.pop(attachment.record.instance, None)

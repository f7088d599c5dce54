"""What the core of a request asks of the rest of its gateway. Values only; `LiveTable.perform` does them."""

from __future__ import annotations

import dataclasses

from millrace.worker.v1 import worker_service_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The one attempt whose frames count."""

    epoch: int
    instance: str


@dataclasses.dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a worker to stop an attempt, or one choice of it.

    `keep`: until the end is recorded, or the next attempt has a worker, it must be able to settle for a dead gateway.
    """

    instance: str
    epoch: int
    choice: int | None = None
    keep: bool = False

    def message(self, request_id: str) -> worker_service_pb2.Cancel:
        """What the worker is sent."""
        return worker_service_pb2.Cancel(request_id=request_id, epoch=self.epoch, choice=self.choice, keep=self.keep)


@dataclasses.dataclass(frozen=True, slots=True)
class Own:
    """Record in the store who runs the request."""

    binding: Binding


@dataclasses.dataclass(frozen=True, slots=True)
class Reattach:
    """A gap: open the stream to this worker again from what is held."""

    instance: str


@dataclasses.dataclass(frozen=True, slots=True)
class Readmit:
    """Queue the request again, ahead of others. Exactly the choices of `prefix` run; empty means all, from the start.

    `again` true: the store lost the same attempt, nothing ran. `lost` are the workers that died with the request in
    hand: the store says whether it is what they died of. `cause` is a reason of the error table. `holder` is a worker
    that left in order, which may still have the keys and values; empty for none.
    """

    attempt: int
    prefix: tuple[tuple[int, tuple[int, ...]], ...] = ()
    again: bool = False
    lost: tuple[str, ...] = ()
    cause: str = dataclasses.field(default="", compare=False)
    holder: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Rechoose:
    """Its version was withdrawn before any token: choose the version, tokenise and queue again, as this attempt."""

    attempt: int


Action = SendCancel | Own | Reattach | Readmit | Rechoose

"""What stays true of one live request, or is replaced as a whole. Values only."""

from __future__ import annotations

import dataclasses

from millrace.common.v1 import admission_pb2
from opentelemetry import trace

from services.common.admission_types import KeyRecord, Pool
from services.gateway.generation import ValidRequest
from services.gateway.metering import ClientLabels


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFacts:
    """What one request is. `entry` is the first attempt's; `received_at` is monotonic seconds.

    Where its version is withdrawn before its first token, `entry`, `request` and `pool` are replaced, and nothing else.
    """

    key: KeyRecord
    pool: Pool
    entry: admission_pb2.AdmissionEntry
    request: ValidRequest
    labels: ClientLabels
    span: trace.Span
    received_at: float

    @property
    def request_id(self) -> str:
        return self.entry.request_id

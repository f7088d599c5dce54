"""What two versions answered to one prompt, held against each other: kept as far as it is compared. Pure."""

from __future__ import annotations

import dataclasses

from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.gateway.generation import TokenEvent

# Of a longer answer only so many tokens are kept and compared.
MAX_COMPARED = 256
_BY_ITSELF = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


@dataclasses.dataclass(slots=True)
class Kept:
    """Choice 0 of an answer. `token_count` is of all that came, `ended` that the model itself ended it."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    token_count: int = 0
    ended: bool = False

    def take(self, event: TokenEvent) -> None:
        """One event, in order."""
        if event.choice != 0:
            return
        room = MAX_COMPARED - len(self.token_ids)
        self.token_ids += event.token_ids[:room]
        self.logprobs += [position.token.logprob for position in event.logprobs[:room]]
        self.token_count += len(event.token_ids)
        self.ended = event.finish_reason in _BY_ITSELF


def compare(primary_request_id: str, primary: Kept, shadow: Kept) -> usage_event_pb2.ShadowReport:
    """How far the greedy answers agree. Where one did not end by itself, only what both have is compared."""
    compared = min(len(primary.token_ids), len(shadow.token_ids))
    equal = next((i for i in range(compared) if primary.token_ids[i] != shadow.token_ids[i]), compared)
    report = usage_event_pb2.ShadowReport(
        primary_request_id=primary_request_id,
        compared_token_count=compared,
        equal_token_count=equal,
        lengths_differ=primary.ended and shadow.ended and primary.token_count != shadow.token_count,
    )
    pairs = list(zip(primary.logprobs, shadow.logprobs, strict=False))[:equal]
    if pairs:
        report.drift_nats = sum(abs(one - other) for one, other in pairs) / len(pairs)
    return report

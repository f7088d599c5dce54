"""Who computes a prompt: the worker that decodes it, or one of role PREFILL that pushes the blocks to it. What a worker
that leaves has computed of a request, it pushes to the one that takes over.

Pure: compares what both would take, from views, the prefix index and the rates that workers measured. What is not
worth a transfer, and what no peer can take, the decoding worker computes. Called by the claim loop at each placing.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from services.router.endpoint import Endpoint, Needs, View
from services.router.filters import has_adapter, is_routable, serves_version
from services.router.prefix_index import PrefixIndex
from services.router.roster import Roster

# Fewer uncached tokens than one prefill chunk: they share a step or two with the running answers.
MIN_UNCACHED_TOKENS: Final = 256
# A prompt may take this many times longer at a peer when that spares answers that run on the decoding worker.
SPARING_FACTOR: Final = 2.0
# Until a worker has measured how fast it prefills: the same for all, so that only queues and transfers differ.
ASSUMED_TOKENS_PER_S: Final = 1_000.0


class Reason(enum.Enum):
    """Why a prompt is computed where it is: at a peer (three reasons), or here."""

    HANDED_OVER = "handed_over"
    PEER_IS_SOONER = "peer_is_sooner"
    SPARES_RUNNING = "spares_running"
    WHOLE_PROMPT = "whole_prompt"
    SUSPECT = "suspect"
    FEW_TOKENS = "few_tokens"
    NO_PEER = "no_peer"
    PEERS_FULL = "peers_full"
    SOONER_HERE = "sooner_here"


@dataclasses.dataclass(frozen=True, slots=True)
class Placing:
    """`peer` computes `peer_token_count` tokens of the prompt; without one the decoding worker computes it."""

    reason: Reason
    peer: Endpoint | None = None
    peer_token_count: int = 0


class Disaggregation:
    """Decides for each request that is about to be submitted."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def decide(self, needs: Needs, decoder: Endpoint, roster: Roster, now: float) -> Placing:
        """`roster` is of the decoder's pool. Never names a peer that would make an idle decoder wait longer."""
        view = decoder.view
        if view is None or needs.whole_prompt:
            return Placing(Reason.WHOLE_PROMPT)
        if needs.suspect:
            return Placing(Reason.SUSPECT)
        if needs.kv_holder:
            holders = [e for e in roster.endpoints if e.instance == needs.kv_holder and e is not decoder]
            if holders and _is_alike(needs, holders[0], view):
                return Placing(Reason.HANDED_OVER, holders[0])
        uncached = self._uncached(needs, decoder, view.block_size, now)
        if uncached < MIN_UNCACHED_TOKENS:
            return Placing(Reason.FEW_TOKENS)
        roster.refresh(now)
        peers = [peer for peer in roster.prefillers() if _can_serve(needs, peer, view, now)]
        if not peers:
            return Placing(Reason.NO_PEER)
        one_slot = dataclasses.replace(needs, slot_count=1)
        free = [peer for peer in peers if peer.fits(one_slot, now)]
        if not free:
            return Placing(Reason.PEERS_FULL)
        here_s = (_queued_tokens(decoder, view) + uncached) / _prefill_rate(view)
        transfer_s = uncached * view.kv_token_byte_count / view.transfer_rate if view.transfer_rate else 0.0
        costs = {peer.instance: self._peer_s(needs, peer, now) + transfer_s for peer in free}
        best = min(free, key=lambda peer: (costs[peer.instance], peer.load))
        peer_tokens = self._uncached(needs, best, view.block_size, now)
        if costs[best.instance] < here_s:
            return Placing(Reason.PEER_IS_SOONER, best, peer_tokens)
        if view.running_count > 0 and costs[best.instance] <= here_s * SPARING_FACTOR:
            return Placing(Reason.SPARES_RUNNING, best, peer_tokens)
        return Placing(Reason.SOONER_HERE)

    def _peer_s(self, needs: Needs, peer: Endpoint, now: float) -> float:
        """Seconds until a peer has computed the prompt. Blocks are pushed meanwhile, so that adding the whole
        transfer to this errs on the side of the decoding worker."""
        assert peer.view is not None
        return (peer.token_load + self._uncached(needs, peer, peer.view.block_size, now)) / _prefill_rate(peer.view)

    def _uncached(self, needs: Needs, endpoint: Endpoint, block_size: int, now: float) -> int:
        cached = self._index.leading(endpoint.instance, needs.block_hashes, now) * block_size
        return max(0, needs.token_count - 1 - cached)


def _can_serve(needs: Needs, peer: Endpoint, decoder: View, now: float) -> bool:
    """A healthy PREFILL worker of that version whose blocks are of the decoder's shape."""
    return is_routable(peer, now) and _is_alike(needs, peer, decoder)


def _is_alike(needs: Needs, peer: Endpoint, decoder: View) -> bool:
    """It serves that version and adapter, and its blocks are of the decoder's shape."""
    view = peer.view
    if view is None or (view.block_size, view.kv_token_byte_count) != (decoder.block_size, decoder.kv_token_byte_count):
        return False
    return serves_version(needs, view) and has_adapter(needs, view)


def _queued_tokens(decoder: Endpoint, view: View) -> int:
    """What a prompt waits for. A batch that runs is not waited for: its answers and the prompt share the steps."""
    return decoder.token_load if view.waiting_count > 0 else decoder.unseen_token_count


def _prefill_rate(view: View) -> float:
    return float(view.prefill_rate or ASSUMED_TOKENS_PER_S)

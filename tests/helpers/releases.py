"""Signed releases for tests."""

from __future__ import annotations

from services.common.release import ContractResult, Evaluation, Manifest, Pins, Release
from services.usage.seals import Signer

# As `millrace eval --out` writes it.
REPORT = {
    "model": "echo@2",
    "perplexity": 20.0,
    "token_count": 1000,
    "slices": {"copying": {"count": 20, "passed": 15}},
    "mean_answer_tokens": 40.0,
}


def signed(manifest: Manifest, signer: Signer) -> Release:
    """The manifest signed with the signer's key."""
    return Release(manifest, signer.public_key, signer.signature(manifest.statement))


def evaluated(version: str) -> Manifest:
    """A manifest of `m` that lacks nothing."""
    pins = Pins("m", version, *["-"] * 8, max_model_len=1, max_num_seqs=1, sampling_defaults={})
    return Manifest(pins, Evaluation(f"m@{version}", 20.0, 1000, 40.0, {}), ContractResult(9, 0, 0))

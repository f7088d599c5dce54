"""From the configured model to a runner and the card that describes it.

The echo model never imports torch. Blocks while files are read. Called by wiring before anything else starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.lifecycle import StartupError
from services.common.release import Pins
from services.worker.config import WorkerConfig, parse_name
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.engine.model_runner import ModelRunner, RunnerSpec
from services.worker.engine.proposer import NgramProposer, Proposer
from services.worker.grammar_gate import GrammarCompiler
from services.worker.release_pins import Build, held_to, kernel_version, pins_of, runtime_version
from services.worker.service import ServedModel
from services.worker.stages import StageClock

if TYPE_CHECKING:
    from services.worker.runtime.factory import LoadedCard

ECHO = "echo"
ECHO_VOCABULARY = 32_000
ECHO_MODEL_LEN = 32_768
# Enough blocks for this many sequences of the longest kind, where num_blocks does not say otherwise.
ECHO_LONG_SEQUENCES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner ready for its first step, its card, what start-up says about memory, and who guesses tokens ahead.

    `grammars` None: the runner has no structured output, and the card says so. `stages` goes on to run until ready.
    """

    runner: ModelRunner
    served: ServedModel
    budget_text: str
    proposer: Proposer | None = None
    grammars: GrammarCompiler | None = None
    stages: StageClock = dataclasses.field(default_factory=StageClock)


def load_model(config: WorkerConfig) -> LoadedModel:
    """Load what MILLRACE_MODEL names, held to its release. Raises StartupError with one plain sentence."""
    loaded, pins = _load(config)
    knobs = config.engine
    if knobs.release:
        loaded.served.card.model.manifest_digest = held_to(Path(knobs.release), knobs.release_key, pins)
    if config.engine.speculation.kind == "ngram":
        return dataclasses.replace(loaded, proposer=NgramProposer())
    return loaded


def load_pins(config: WorkerConfig) -> Pins:
    """What the manifest of a release of this model pins; loads the model as a worker does. Raises StartupError."""
    return _load(config)[1]


def _load(config: WorkerConfig) -> tuple[LoadedModel, Pins]:
    return _echo(config) if config.model == ECHO else _torch(config)


def manifest_digest(*parts: bytes) -> bytes:
    """SHA-256 over length-prefixed parts: what names a version that has no release."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def echo_salt(version: str) -> str:
    """What tells the tokens of an echo version apart; version 1 is the plain hash that clients know."""
    return "" if version == "1" else version


def _echo(config: WorkerConfig) -> tuple[LoadedModel, Pins]:
    knobs = config.engine
    if knobs.speculation.kind in ("draft", "self"):
        raise StartupError(f"The echo model cannot be drafted for: speculation={knobs.speculation}.")
    length = knobs.max_model_len if knobs.max_model_len is not None else ECHO_MODEL_LEN
    blocks = knobs.num_blocks
    if blocks is None:
        blocks = -(-length // knobs.block_size) * ECHO_LONG_SEQUENCES
    spec = RunnerSpec(
        vocab_size=ECHO_VOCABULARY,
        max_model_len=length,
        block_size=knobs.block_size,
        num_blocks=blocks,
        eos_token_ids=frozenset(),
        deterministic=True,
    )
    step_s = config.echo_step_ms / 1e3
    script = FakeScript(before_step=lambda decision: time.sleep(step_s))
    card = worker_service_pb2.ModelCard(
        max_model_len=length,
        vocab_size=ECHO_VOCABULARY,
        block_size=knobs.block_size,
        block_count=blocks,
        tokenizer_digest=hashlib.sha256(b"").digest(),
        # `t31999 `
        longest_token_byte_count=7,
        deterministic=True,
        owner="millrace",
        runner="fake",
        max_num_seqs=knobs.max_num_seqs,
    )
    digest = hashlib.sha256(f"millrace echo {config.model_version}".encode()).digest()
    _name(card, config, own_name=ECHO, model_digest=digest, dtype="none")
    text = f"echo model: no weights, {blocks} KV blocks of {knobs.block_size} tokens, at most {length} a sequence"
    runner = FakeModelRunner(spec, script=script, salt=echo_salt(config.model_version))
    build = Build(digest, "none", "none", runtime_version(), "none", "any")
    return LoadedModel(runner, ServedModel(card, b""), text), pins_of(card, build)


def _torch(config: WorkerConfig) -> tuple[LoadedModel, Pins]:
    stages = StageClock()
    # Here and not above: a worker of the echo model must not load torch.
    from services.worker.models.errors import ModelLoadError
    from services.worker.runtime.factory import DraftOptions, RunnerOptions, load_runner

    stages.ended("imports")
    knobs = config.engine
    draft = None
    if knobs.speculation.kind in ("draft", "self"):
        draft = DraftOptions(knobs.speculation.model, knobs.speculation.layers, knobs.max_draft_batch)
    options = RunnerOptions(
        model=config.model,
        dtype=knobs.dtype,
        kv_cache_dtype=knobs.kv_cache_dtype,
        max_model_len=knobs.max_model_len,
        max_num_seqs=knobs.max_num_seqs,
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        gpu_memory_utilization=knobs.gpu_memory_utilization,
        block_size=knobs.block_size,
        num_blocks=knobs.num_blocks,
        threads=knobs.threads,
        kernel_cache_dir=Path(config.data_dir) / "kernels" if config.data_dir else None,
        draft=draft,
    )
    try:
        loaded = load_runner(options, stages)
    except ModelLoadError as error:
        raise StartupError(f"The model cannot be served: {error}.") from error
    facts = loaded.card
    card = worker_service_pb2.ModelCard(
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        block_count=facts.num_blocks,
        eos_token_ids=sorted(facts.eos_token_ids),
        bos_token_id=facts.bos_token_id,
        add_bos=facts.add_bos,
        chat_template=facts.chat_template,
        tokenizer_digest=facts.tokenizer_digest,
        longest_token_byte_count=facts.longest_token_bytes,
        deterministic=facts.deterministic,
        owner=facts.owner,
        special_tokens=dict(facts.special_tokens),
        runner="torch",
        max_num_seqs=config.engine.max_num_seqs,
        structured_output=loaded.grammars is not None,
    )
    _name(card, config, own_name=facts.model_name, model_digest=facts.model_digest, dtype=facts.dtype)
    model = LoadedModel(
        loaded.runner,
        ServedModel(card, facts.tokenizer_json),
        facts.budget_text,
        proposer=loaded.proposer,
        grammars=loaded.grammars,
        stages=stages,
    )
    return model, pins_of(card, _build(facts))


def _build(facts: LoadedCard) -> Build:
    from services.worker.kernels.cpu import ABI

    return Build(
        weights_digest=facts.model_digest,
        dtype=facts.dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        runtime=runtime_version("torch"),
        kernels=kernel_version(ABI),
        hardware=facts.hardware,
    )


def _name(
    card: worker_service_pb2.ModelCard, config: WorkerConfig, *, own_name: str, model_digest: bytes, dtype: str
) -> None:
    name = config.model_name or own_name
    try:
        parse_name(name)
    except ValueError as error:
        raise StartupError(f"The model's own name {name!r} cannot be served; set MILLRACE_MODEL_NAME.") from error
    card.model.CopyFrom(
        common_pb2.ModelRef(
            model=name,
            version=config.model_version,
            manifest_digest=manifest_digest(
                model_digest,
                card.tokenizer_digest,
                card.chat_template.encode(),
                dtype.encode(),
                config.engine.kv_cache_dtype.encode(),
                card.max_model_len.to_bytes(8, "big"),
            ),
        )
    )

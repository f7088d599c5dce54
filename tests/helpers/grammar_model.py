"""A transformer of random weights behind the embedded model's real tokenizer: a step takes about a millisecond."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from tokenizers import Tokenizer

from services.worker.engine.request import Grammar, GrammarKind
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import DecoderTensors
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.llama import llama_tensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.tensors import GGMLType, NamedTensors, StoredTensor
from services.worker.runtime.grammar import GrammarCompiler
from services.worker.runtime.torch_forward import TorchForward
from tests.golden.make_smollm2_greedy import model_path
from tests.helpers.model import CONTEXT, ModelRig


@functools.cache
def tiny_tensors() -> tuple[Checkpoint, DecoderTensors]:
    """The checkpoint, in all but its tokenizer made up, and its tensors; the same in each run."""
    real = load_gguf(model_path())
    config = dataclasses.replace(
        real.config,
        hidden_size=32,
        intermediate_size=64,
        layer_count=1,
        head_count=1,
        kv_head_count=1,
        head_dim=32,
        context_length=CONTEXT,
        rope=dataclasses.replace(real.config.rope, dimension=32),
        tied_embeddings=True,
    )
    tensors = llama_tensors(config, NamedTensors(_random_tensors(config)))
    return dataclasses.replace(real, config=config), tensors


@functools.cache
def tiny_model() -> tuple[Checkpoint, TorchForward]:
    """For `ModelRig(model=…)`."""
    checkpoint, tensors = tiny_tensors()
    return checkpoint, TorchForward(tensors, max_model_len=CONTEXT)


@functools.cache
def grammar_compiler() -> GrammarCompiler:
    """A compiler for the embedded model's tokenizer."""
    checkpoint, _ = tiny_tensors()
    tokenizer = checkpoint.tokenizer
    return GrammarCompiler(
        tokenizer.json, vocab_size=checkpoint.config.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )


def compiled(kind: GrammarKind, text: str = "", *choices: str) -> Grammar:
    """A grammar that the runner can run."""
    grammar = Grammar(kind, text, choices)
    return dataclasses.replace(grammar, compiled=grammar_compiler().compile(grammar))


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer as its own library reads it."""
    return Tokenizer.from_str(tiny_tensors()[0].tokenizer.json.decode())


@functools.cache
def closing_bias(strength: float) -> tuple[tuple[int, float], ...]:
    """For tokens that close what is open in JSON: a random model would hardly ever choose one."""
    vocabulary = tokenizer().get_vocab()
    return tuple((vocabulary[text], strength) for text in ('"', '",', '"}', '"]', "}", "]"))


def text_of(rig: ModelRig, request_id: str = "a", choice: int = 0) -> str:
    """What a choice said, without the end of the text."""
    ends = tiny_tensors()[0].tokenizer.eos_token_ids
    return str(tokenizer().decode([token for token in rig.tokens(request_id, choice) if token not in ends]))


def _random_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    random = np.random.default_rng(7)
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.embedding_rows, hidden), "norm.weight": (hidden,)}
    for index in range(config.layer_count):
        layer = f"layers.{index}."
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_norm", "post_norm")}
        shapes |= {f"{layer}{name}.weight": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        shapes |= {f"{layer}{name}.weight": (wide, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}down_proj.weight"] = (hidden, wide)
    found = {}
    for name, shape in shapes.items():
        values = random.normal(0.0, 0.3, shape).astype("<f4")
        data = values.view(np.uint8).reshape(shape[0] if len(shape) > 1 else 1, -1)
        found[name] = StoredTensor(name, shape, GGMLType.F32, data)
    return found

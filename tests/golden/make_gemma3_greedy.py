"""Writes `gemma3_greedy.json`: 32 greedy token ids a prompt by llama.cpp's server, which has loaded Gemma 3 270M.

Run by hand when the prompts change: python -m tests.golden.make_gemma3_greedy http://127.0.0.1:8080
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

OUTPUT = Path(__file__).with_name("gemma3_greedy.json")
LENGTH = 32
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "東京は日本の",
    "1, 2, 3, 4, 5, 6, 7,",
    # Longer than the window of 512 tokens that most layers see.
    "The history of computing begins " + "with machines that count. Each machine " * 90,
)


def main(url: str) -> None:
    """Ask for each prompt with its BOS, past any end of turn."""
    cases = []
    with httpx.Client(base_url=url, timeout=300) as client:
        for prompt in PROMPTS:
            ids = client.post("/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
            body = {"prompt": ids, "n_predict": LENGTH, "temperature": 0, "ignore_eos": True, "return_tokens": True}
            answer = client.post("/completion", json=body).raise_for_status().json()
            cases.append(json.dumps({"prompt_ids": ids, "output_ids": answer["tokens"]}, separators=(",", ":")))
    OUTPUT.write_text("[\n" + ",\n".join(cases) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

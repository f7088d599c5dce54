"""Writes `tokenizer_<model>.json`: ids that llama.cpp's server gives to a fixed corpus of awkward text.

Run by hand when the corpus changes, against a `llama-server` that has loaded the model's GGUF:
python -m tests.golden.make_tokenizer_goldens smollm2 http://127.0.0.1:8080
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

FOLDER = Path(__file__).parent
SHOWN = 24
_FUZZED = 280
_SEED = 20
_WRITTEN = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\n\n\n\n\n",
    "\r\n",
    "\r\r\n\n",
    " \n \n ",
    "\t\t\t\tx",
    " leading",
    "trailing ",
    "  two  inside  and  around  ",
    "a" + " " * 40 + "b",
    " " * 33,
    "\u00a0\u2003\u3000\u202f|\u2028\u2029",
    "zero\u200bwidth\u200cjoin\u200d\u2060\ufeffmark",
    "a\n\n\nb\r\n\tc",
    "def f(x):\n    return {'a': [x, *y]}  # done\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n}\n",
    '{"key": "value", "list": [1, 2.50, -3e-7, null]}',
    "SELECT * FROM t WHERE a<>'b' AND c>=10;--x",
    "<html lang='en'><body>&nbsp;</body></html>",
    "https://example.com/a/b?c=d&e=%20f#g",
    "snake_case camelCase PascalCase SCREAMING_CASE __init__",
    "C:\\Program Files\\x\\y.txt",
    "#!/bin/sh\nset -eu; echo \"${HOME:-none}\" | sed 's/a/b/g'",
    "don't we'll I'VE they're it'S 'quoted' o'clock 'tis",
    "1",
    "12",
    "123",
    "1234567890",
    "00000000000000000000000000",
    "1,234,567.89",
    "1_000_000",
    "1 000 000",
    "3.14159e-10",
    "2024-01-31T23:59:59Z",
    "+1 (555) 010-9999",
    "192.168.0.1:8080",
    "0xDEADBEEF 0b1010 0o777",
    "a1b22c333d4444",
    "١٢٣ ४५६ 四五六 ½ ② Ⅳ ³",
    "日本語の文章です。",
    "中文没有空格，也能分词。",
    "한국어 띄어쓰기",
    "ภาษาไทยไม่มีช่องว่าง",
    "हिन्दी में लिखा",
    "العربية עברית فارسی",
    "Ελληνικά Русский Հայերեն ქართული",
    "naïve café — “quoted” … ‰ €5 £6",
    "Straße ÄÖÜ İstanbul ıI ŁÓDŹ",
    "e\u0301 vs é, n\u0303 vs ñ",
    "Z\u0351\u036b\u0343a\u034f\u0321l\u0334\u0300g\u0489o",
    "ﬁ ligature ﷽ ＦＵＬＬ ｗｉｄｔｈ",
    "😀",
    "👩‍👩‍👧‍👦🏳️‍🌈 ☕️ 👍🏽 🇫🇷🇯🇵",
    "😀😀😀😀😀😀😀😀",
    "text😀text 😀 text",
    "\u202eright-to-left\u202c",
    "\U0001d49c\U0001d4b7\U0001d4b8 𠀀𪛖",
    "\ue000\uf8ff\ufffd",
    "\x01\x07\x0b\x0c\x1b[31mred\x1b[0m\x7f\x85",
    "nul\x00inside",
    "x" * 300,
    "ab" * 150,
    "!" * 77,
    "=" * 64 + "\n" + "-" * 64,
    "_" * 17 + "." * 19 + "*" * 23,
    "ha" * 40 + "A" * 50,
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "https" + "www" * 20 + "com",
    "\u00e9" * 60,
    "日" * 80,
    "<|im_end|>",
    "<|im_start|>system\nobey<|im_end|>\n<|endoftext|>",
    "<bos><eos><pad><unk><mask>",
    "<s></s>[INST] [/INST]<<SYS>>",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<|begin_of_text|><|eot_id|><|user|>",
    "<0x0A><0xFF>▁▁ ▁",
    "<unused0><unused99><table><h1></h1><strong>",
    "< |im_end| > <|im_end <|im_end|",
    "The quick brown fox jumps over the lazy dog.",
    "THE QUICK BROWN FOX",
    "Hello, world! Hello,world!Hello ,world",
    "...and so on... (etc.) [1] {2}",
    "a.b,c;d:e!f?g-h_i/j\\k|l",
    "é" + "a" * 2 + " " * 3 + "\n" * 2 + "1" * 4,
)
# Alphabets of the fuzzer: explicit ranges, so that no Unicode version decides what the corpus is.
_ALPHABETS: tuple[Sequence[str], ...] = (
    tuple(" \t\n\r\u00a0\u3000"),
    tuple("abcdefghijklmnopqrstuvwxyz"),
    tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    tuple("0123456789"),
    tuple("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
    tuple(["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL"]),
    tuple(map(chr, range(0xC0, 0x180))),
    tuple(map(chr, range(0x300, 0x340))),
    tuple(map(chr, range(0x3B1, 0x3CA))),
    tuple(map(chr, range(0x410, 0x450))),
    tuple(map(chr, range(0x5D0, 0x5EB))),
    tuple(map(chr, range(0x621, 0x64B))),
    tuple(map(chr, range(0x905, 0x93A))),
    tuple(map(chr, range(0x3041, 0x3097))),
    tuple(map(chr, range(0x4E00, 0x4F00))),
    tuple(map(chr, range(0xAC00, 0xAD00))),
    tuple(map(chr, range(0x1F600, 0x1F640))),
    tuple("\u200b\u200c\u200d\u2060\ufeff\ufe0f"),
    tuple("\x01\x02\x08\x1f\x7f\x80\x9f"),
    ("the", " of", "ing", " function", "return", " http", "ation", "<|", "|>", "<", ">", "▁", " 20"),
)


def corpus() -> tuple[str, ...]:
    """The written cases, then strings of one to four alphabets in runs, always the same."""
    rng = random.Random(_SEED)
    fuzzed = []
    for _ in range(_FUZZED):
        chosen = rng.sample(_ALPHABETS, rng.randint(1, 4))
        runs = []
        for _ in range(rng.randint(1, 7)):
            letters = rng.choice(chosen)
            runs.append("".join(rng.choice(letters) for _ in range(rng.randint(1, 6))))
        fuzzed.append(rng.choice(("", " ")).join(runs))
    return _WRITTEN + tuple(fuzzed)


def summary(token_ids: Sequence[int]) -> list[int | str]:
    """The ids, or when there are many the first of them, their count and a digest of all."""
    ids: list[int | str] = list(token_ids)
    if len(ids) <= SHOWN:
        return ids
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
    return [*ids[:SHOWN], f"{len(ids)} ids, {digest}"]


def golden(model: str) -> list[list[int | str]]:
    """`summary` of each string of the corpus by llama.cpp."""
    cases: list[list[int | str]] = json.loads(golden_path(model).read_text())
    return cases


def golden_path(model: str) -> Path:
    """Where the ids of `model` are kept."""
    return FOLDER / f"tokenizer_{model}.json"


def main(model: str, url: str) -> None:
    """Ask the server for every string, control tokens in it staying text, and write the file."""
    lines = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for text in corpus():
            body = {"content": text, "add_special": False, "parse_special": False}
            answer = client.post("/tokenize", json=body).raise_for_status()
            lines.append(json.dumps(summary(answer.json()["tokens"]), separators=(",", ":")))
    golden_path(model).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

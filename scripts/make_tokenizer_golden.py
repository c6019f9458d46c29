"""Writes tests/golden/tokenizer_smollm2.json.gz: what llama.cpp's tokenizer makes of many texts.

Run it where llama-cpp-python is installed (0.3.36 made the committed file), not in the project's environment:

    python scripts/make_tokenizer_golden.py SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/tokenizer_smollm2.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import unicodedata
import zlib
from pathlib import Path

import llama_cpp

SPACES = [" ", "\t", "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u180e", "\u2000"]
SPACES += ["\u2009", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"]
WORDS = ["the", "Hello", "I", "don't", "WE'LL", "naïve", "Straße", "ſ", "łódź", "мир", "你好", "世界", "こんにちは"]
WORDS += [
    "안녕하세요",
    "مرحبا",
    "שלום",
    "नमस्ते",
    "สวัสดี",
    "ქართული",
    "🌶",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "é",
    "e\u0301",
    "x_1",
    "42",
    "٣٤",
    "Ⅷ",
    "½",
]
MARKS = [*".,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+~`", "—", "…", "«", "»", "“", "”", "。", "、", "×", "÷", "€", "✓", "→"]
SENTENCES = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "I'm you're he's we've they'll I'd it'S DON'T I'M 'tis rock'n'roll ' s 's",
    "’s ’t it’s",
    "0 1 12 123 1234567890 3.14159 1e-9 0x1F 1,000,000 ٠١٢٣ ०१२ ０１２ ²³ ½ Ⅻ ① 一二三 𝟘𝟙",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c[i]; }\r\n",
    "https://example.com/a?b=c&d=%20#frag user@example.com C:\\Users\\x",
    '{"key": [1, 2.5, null], "ключ": "значение"}',
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text <|endoftext|> more<|endoftext|><|im_end|>",
    " <|im_start|> ",
    "<|im_start|><|im_start|>",
    "<|im_start|im_end|>",
    "<<|im_end|>>",
    "<|im_end",
    "|im_end|>",
    "<repo_name>a/b<file_sep>c.py\n<filename>d<reponame><gh_stars>100",
    "<issue_start><issue_comment>x<issue_closed><jupyter_start><jupyter_text>t<jupyter_code>c<jupyter_output>",
    "Zürich, Ærø, Đà Nẵng, Kraków, İstanbul, ΑΒΓ αβγ, ЁЖ ёж",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。それは私を傷つけません。",
    "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית",
    "मैं काँच खा सकता हूँ ฉันกินกระจกได้ ខ្ញុំអាច မြန်မာ བོད་",
    "👍🏽 👩‍💻 🏳️‍🌈 🇺🇳 ☺️ ❤️‍🔥 1️⃣ 🫠🫨",
    "ẞ ǅ ŉ ﬁ ﷺ \u0130 \u0131 K Å Ω",
    "a\u0300\u0301\u0302 Z̷̧̈a̵l̶g̷o̸",
    "\u200bzero\u200cwidth\u200djoin\ufeffbom\u2060",
    "\ue000\uf8ff\U000f0000\U0010fffd",
    "\ufdd0\ufffe\uffff\U0001ffff\U0010ffff",
    "\ufffd\ufffd",
    "\x01\x02\x7f\x80\x9f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 𓀀 𠀀 🀄",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_CASE",
    "....!!!!???? ---- ==== #### **** ____ ~~~~ ....",
    "a" * 70 + "b" * 70,
    "=" * 100,
    " " * 100 + "x",
]


# Every character stands where `?` does; of each block of characters a checksum of the ids is kept.
BLOCK = 256
BLOCK_TEXT = "\n x?a '?s ?5?? !?! \t?"


def texts() -> list[str]:
    rng = random.Random(20_240_229)
    out = list(SENTENCES)
    for space in SPACES:
        out += [
            space,
            space * 2,
            f"a{space}b",
            f"a{space * 2}b",
            f"a{space * 3}",
            f" {space}x",
            f"{space} x",
            f"1{space}!",
        ]
    out += [first + second + "x" for first in SPACES for second in rng.sample(SPACES, 6)]
    out += [f"{word}{mark}{word}" for word in WORDS for mark in rng.sample(MARKS, 4)]
    out += [f" {mark}{mark} {mark}a 1{mark}" for mark in MARKS]

    # Each character of every block of 256 that has some assigned ones, a few of each, in three surroundings.
    for block in range(0, 0x11_0000, 0x100):
        chars = [
            chr(code)
            for code in range(block, block + 0x100)
            if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")
        ]
        for char in rng.sample(chars, min(4 if block < 0x3000 else 1, len(chars))):
            out.append(f"a{char} {char}{char}1 {char}b")
    out += [f"x{chr(code)} {chr(code)}y" for code in rng.sample(range(0xE0000, 0x110000), 20)]

    # One text for every general category, so that each meets each.
    pool: dict[str, list[str]] = {}
    for code in range(0x2FA20):
        pool.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    for gone in ("Cs", "Cn"):
        pool.pop(gone)
    for category in sorted(pool):
        for _ in range(6):
            out.append(
                "".join(
                    rng.choice([rng.choice(pool[category]), rng.choice(SPACES), rng.choice("aZ5.'")]) for _ in range(14)
                )
            )
    alphabet = [*WORDS, *MARKS, *SPACES, *"0123456789", "'s", "'LL", "<|im_end|>", "<|im_start|>"]
    for _ in range(400):
        out.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 14))))
    categories = sorted(pool)
    for _ in range(200):
        out.append("".join(rng.choice(pool[rng.choice(categories)]) for _ in range(rng.randint(1, 10))))
    return list(dict.fromkeys(out))


def block_starts() -> list[int]:
    """All of Unicode but ideographs, Hangul, surrogates and the empty planes, where every character is alike."""
    alike = [(0x3400, 0xA000), (0xAC00, 0xF900), (0x17000, 0x18D00), (0x20000, 0xE0000), (0xE0200, 0x110000)]
    starts = range(0, 0x110000, BLOCK)
    return [start for start in starts if not any(low <= start < high for low, high in alike)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    llama = llama_cpp.Llama(str(args.model), vocab_only=True, verbose=False)

    def ids(text: str, special: bool) -> list[int]:
        return llama.tokenize(text.encode(), add_bos=False, special=special)

    cases = []
    for text in texts():
        plain, special = ids(text, False), ids(text, True)
        cases.append([text, plain] if plain == special else [text, plain, special])
    blocks = []
    for start in block_starts():
        text = "".join(BLOCK_TEXT.replace("?", chr(code)) for code in range(start, start + BLOCK))
        blocks.append([start, zlib.crc32(json.dumps(ids(text, False)).encode())])
    golden = {
        "made_by": f"llama-cpp-python {llama_cpp.__version__}, {args.model.name}",
        "block_text": BLOCK_TEXT,
        "block": BLOCK,
        "blocks": blocks,
        "cases": cases,
    }
    data = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).encode()
    args.out.write_bytes(gzip.compress(data, 9, mtime=0) if args.out.suffix == ".gz" else data)
    print(f"{len(cases)} texts, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

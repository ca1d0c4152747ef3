"""Texts that the original decoder writes by itself, for train.py --text: a user's turn and what follows it.

    python3 sample.py --count 2000 >text.jsonl

Sampled at temperature 1 from the opening of a user's turn alone, so neither a corpus nor a list of questions is needed. The same
options give the same texts on the same device. Needs torch and transformers, and smollm2 as get.sh makes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

BASE = Path(__file__).resolve().parents[2] / "build/real/smollm2"


@torch.no_grad()
def texts(base: Path, count: int, length: int, batch: int):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    start = tokenizer("<|im_start|>user\n", return_tensors="pt").to(device)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.95, "max_new_tokens": length}
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")  # the end of a turn does not end the text
    for first in range(0, count, batch):
        ids = model.generate(**start, **settings, num_return_sequences=min(batch, count - first), eos_token_id=end, pad_token_id=end)
        for text in tokenizer.batch_decode(ids):
            yield text.split("<|endoftext|>")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=BASE, help="checkpoint; default: that of get.sh")
    parser.add_argument("--count", type=int, default=2000, help="texts; default: 2000")
    parser.add_argument("--length", type=int, default=250, help="most tokens of a text; default: 250")
    parser.add_argument("--batch", type=int, default=64, help="texts at once; default: 64")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args()
    if not (options.base / "model.safetensors").is_file():
        parser.error(f"{options.base} has no model.safetensors; run tools/real/get.sh, or name a folder with --base")
    torch.manual_seed(options.seed)
    for text in texts(options.base, options.count, options.length, options.batch):
        print(json.dumps({"text": text}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

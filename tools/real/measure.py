"""How far a trained model still is the original one: plain English, channels of keys and values, weights.

    python3 measure.py [--model build/real/smol-internvl] [--texts 16] [--scenes 8]

Prints the perplexity of texts of prompts.py for both models; the loudest channel of a layer's keys and values against the median
one (mean magnitude; least, median and greatest layer), for text and for visual tokens of held-out scenes; and the distance of the
weights from the original ones, relative to these (Frobenius; mean by kind of matrix).
Outliers of channels are what cache quantizers are made for, so a model for judging them must keep them. The divergence of the
answers is `vlm-kv fidelity -m build/real/smol-internvl --reference build/real/smollm2 --kv f16 --data prompts.jsonl`.
Needs torch, torchvision, transformers and pillow.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from itertools import islice
from pathlib import Path

import prompts
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
HELDOUT = ROOT / "tools/pocket/heldout"


class Channels:
    """Mean magnitude of every channel of keys and values, by layer."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, cache, tokens: slice | torch.Tensor) -> None:
        for part in ("keys", "values"):
            found = torch.stack([getattr(layer, part)[0][:, tokens].abs().mean(1).flatten() for layer in cache.layers])
            self.sums[part] = self.sums.get(part, 0) + found

    def ratios(self) -> dict[str, list[float]]:
        found = {part: (sums.amax(1) / sums.median(1).values).tolist() for part, sums in self.sums.items()}
        return {part: [min(r), statistics.median(r), max(r)] for part, r in found.items()}


class Model:
    def __init__(self, folder: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def run(self, text: str, image: Image.Image | None = None):
        inputs = self.processor(text=[text], images=image and [image], return_tensors="pt").to(self.device)
        return inputs["input_ids"][0], self.model(**inputs, use_cache=True)

    def english(self, records: list[dict]) -> tuple[float, Channels]:
        """Perplexity of the texts after their prompts, without the template of a chat, and the channels of all tokens."""
        loss, count, channels = 0.0, 0, Channels()
        for record in records:
            before = len(self.processor.tokenizer(record["prompt"] + " ").input_ids) - 1  # the space opens the next word
            ids, out = self.run(f"{record['prompt']} {record['text']}")
            loss += F.cross_entropy(out.logits[0, before - 1 : -1], ids[before:], reduction="sum").item()
            count += len(ids) - before
            channels.add(out.past_key_values, slice(0, None))
        return math.exp(loss / count), channels

    def scenes(self, count: int) -> Channels:
        """Channels of visual tokens."""
        channels = Channels()
        content = [{"type": "image"}, {"type": "text", "text": "Describe the image."}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        for i in range(count):
            ids, out = self.run(text, Image.open(HELDOUT / f"scenes/scene_{i:03d}.png").convert("RGB"))
            channels.add(out.past_key_values, ids == self.model.config.image_token_id)
        return channels


def distances(base: Path, model: Path) -> dict[str, float]:
    """Mean relative distance of the matrices of each kind, such as language_model.self_attn.q_proj."""
    kinds: dict[str, list[float]] = {}
    with safe_open(base / "model.safetensors", "pt") as old, safe_open(model / "model.safetensors", "pt") as new:
        for name in old.keys():
            if re.search(r"\.layers?\.\d+\.", name) and (was := old.get_tensor(name).float()).ndim == 2:
                kind = re.sub(r"\.(model|encoder)\b|\.layers?\.\d+|\.weight$", "", name)
                kinds.setdefault(kind, []).append(((new.get_tensor(name).float() - was).norm() / was.norm()).item())
    return {kind: statistics.mean(values) for kind, values in sorted(kinds.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/real/smol-internvl", help="checkpoint; default: that of get.sh")
    parser.add_argument("--base", type=Path, default=ROOT / "build/real/smollm2", help="what it was trained from; default: that of get.sh")
    parser.add_argument("--texts", type=int, default=16, help="of plain English; default: 16")
    parser.add_argument("--scenes", type=int, default=8, help="held-out scenes; default: 8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    logging.disable_progress_bar()
    records = list(islice(prompts.records(prompts.FOLDER, options.texts), options.texts))
    figures: dict = {}
    for name, folder in (("original", options.base), ("trained", options.model)):
        model = Model(folder)
        perplexity, channels = model.english(records)
        figures[name] = {"perplexity": perplexity, "text": channels.ratios()}
    figures["trained"]["visual"] = model.scenes(options.scenes).ratios()
    figures["distance"] = distances(options.base, options.model)
    if options.json:
        print(json.dumps(figures))
        return 0
    for name in ("original", "trained"):
        print(f"{name:9s} perplexity of {len(records)} texts {figures[name]['perplexity']:.1f}")
        for kind in ("text", "visual"):
            for part, ratios in figures[name].get(kind, {}).items():
                print(f"{name:9s} {kind:6s} tokens, {part:6s}: loudest channel / median {' / '.join(f'{r:.1f}' for r in ratios)}")
    for kind, distance in figures["distance"].items():
        print(f"{kind:45s} moved by {distance:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

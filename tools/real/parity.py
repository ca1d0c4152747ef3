"""Compares vlm-run with transformers on the two models of get.sh: float32, greedy, on a CPU, token for token.

    python3 parity.py [--count 50] [--out parity.jsonl]

In equal shares: held-out captions, documents and questions of tools/pocket, images of awkward sizes, and texts for smollm2. For
an answer that differs it prints the first step that does, and how far apart the logits of the two tokens are there: in float32
a difference near 1e-4 is a tie. Exits 1 if an answer differs. Needs torch, torchvision, transformers and pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELDOUT = ROOT / "tools/pocket/heldout"
SIZES = ((1, 1), (2, 700), (13, 17), (449, 447), (336, 1000), (448, 448), (897, 31), (224, 225), (1021, 769), (100, 336))
TEXTS = (
    "What is the capital of France?", "Count from 95 to 112.", "Write  two\n\n\tlines about rain.", "Repeat: na\u00efve \u2603 \U0001f600 \u65e5\u672c\u8a9e",
    "def f(x):\n    return x**2 - 1  # what is f(12.5)?", "Why?", "List seven animals, one a line.", "Translate to German: I have 3 cats.",
    "<not a token> and <|almost|", "Finish the sentence: The quick brown fox",
)  # fmt: skip


def requests(folder: Path, count: int) -> tuple[list[dict], list[dict]]:
    """Requests with images, which are drawn into `folder` where they have awkward sizes, and requests of text alone."""
    from PIL import Image

    shown, each = [], [count // 5 + (i < count % 5) for i in range(5)]
    for name, share in zip(("captions", "documents", "questions"), each):
        lines = (HELDOUT / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        shown += [json.loads(lines[i * len(lines) // share]) for i in range(share)]
    for i in range(each[3]):
        width, height = SIZES[i % len(SIZES)]
        source = Image.open(HELDOUT / f"scenes/scene_{i + 1:03d}.png").convert("RGB")
        source.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
        shown.append({"id": f"size_{i}_{width}x{height}", "image": str(folder / f"{i}.png"), "prompt": "Describe the image."})
    for request in shown:
        request["image"] = str(HELDOUT / request["image"])  # an absolute path stays
    return shown, [{"id": f"text_{i}", "prompt": TEXTS[i % len(TEXTS)]} for i in range(each[4])]


def ours(program: Path, model: Path, asked: list[dict], folder: Path, limit: int, threads: int) -> dict[str, dict]:
    """The answers of vlm-run by id."""
    batch, out = folder / f"{model.name}.jsonl", folder / f"{model.name}.out.jsonl"
    batch.write_text("".join(json.dumps(request) + "\n" for request in asked), encoding="utf-8")
    exact = ("--device", "cpu", "--dtype", "f32", "--kv", "f32", "-n", str(limit), "-t", str(threads))
    subprocess.run([program, "-q", "-m", model, "--batch", batch, "--out", out, *exact])
    if not out.is_file():
        sys.exit(f"parity.py: {program} answered nothing; see what it says above")
    return {record["id"]: record for record in map(json.loads, out.read_text(encoding="utf-8").splitlines())}


class Reference:
    """A model of transformers with its processor."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForImageTextToText, AutoProcessor
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def answer(self, request: dict, limit: int):
        """Number of prompt tokens, the ids of the answer and the logits (tokens, vocabulary) that they were the largest of."""
        import torch
        from PIL import Image

        images = [Image.open(request["image"]).convert("RGB")] if "image" in request else []
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": request["prompt"]}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
        settings = {"do_sample": False, "max_new_tokens": limit, "return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            made = self.model.generate(**inputs, **settings)
        length = inputs["input_ids"].shape[1]
        return length, made.sequences[0, length:].tolist(), torch.cat(made.logits).float()


def compare(reference: Reference, request: dict, record: dict, limit: int) -> dict:
    """What came of one request; `step` and `gap` only if the answers differ."""
    length, ids, logits = reference.answer(request, limit)
    best = logits.topk(2).values
    found = {"id": request["id"], "tokens": len(ids), "equal": True, "least_gap": (best[:, 0] - best[:, 1]).min().item()}
    if record.get("error") or record["prompt_tokens"] != length:
        return found | {"equal": False, "error": record.get("error", f"{record['prompt_tokens']} prompt tokens, not {length}")}
    if record["tokens"] != ids:
        step = next(i for i, (a, b) in enumerate(zip([*record["tokens"], -1], [*ids, -1])) if a != b)
        gap = (logits[step, ids[step]] - logits[step, record["tokens"][step]]).item() if step < min(len(ids), len(record["tokens"])) else None
        found |= {"equal": False, "step": step, "gap": gap, "theirs": ids, "ours": record["tokens"]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
    parser.add_argument("--program", type=Path, default=build / "tools/vlm-run", help="default: that of KVLM_BUILD, else build/release")
    parser.add_argument("--models", type=Path, default=ROOT / "build/real", help="folder of the two models; default: build/real")
    parser.add_argument("--count", type=int, default=50, help="requests; default: 50")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer; default: 200")
    parser.add_argument("--threads", type=int, default=1, help="of each program; default: 1")
    parser.add_argument("--out", type=Path, help="a line for each request, JSON Lines")
    options = parser.parse_args()
    if not 1 <= options.count <= 500:
        parser.error(f"--count {options.count} is not from 1 to 500")
    if missing := [name for name in ("smol-internvl", "smollm2") if not (options.models / name).is_dir()]:
        parser.error(f"{options.models} has no {missing[0]}; run tools/real/get.sh, or name another folder with --models")
    import torch

    torch.set_num_threads(options.threads)
    found = []
    with tempfile.TemporaryDirectory(prefix="kvlm-parity-") as scratch:
        for name, asked in zip(("smol-internvl", "smollm2"), requests(Path(scratch), options.count)):
            if not asked:
                continue
            records = ours(options.program, options.models / name, asked, Path(scratch), options.max_tokens, options.threads)
            reference = Reference(options.models / name)
            for request in asked:
                found.append(compare(reference, request, records[request["id"]], options.max_tokens))
                print(json.dumps({k: v for k, v in found[-1].items() if k not in ("ours", "theirs")}), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    equal = sum(line["equal"] for line in found)
    print(f"{equal} of {len(found)} answers are transformers' token for token; the two best logits are at least "
          f"{min(line['least_gap'] for line in found):.2g} apart")
    return 0 if equal == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

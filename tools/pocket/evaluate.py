"""Answers request files with transformers (greedy, float32), for scoring and as a reference for other programs.

    python3 evaluate.py --model pocket-qwen --requests heldout/clips.jsonl --out clips.pred.jsonl
    python3 evaluate.py --model pocket-qwen --reference R.json --requests A.jsonl B.jsonl --count 50 --batch 1

Predictions are lines {"id", "text"}. A reference also holds the prompt, the number of input ids, the generated ids
and the smallest gap between the two best logits on the way.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image, ImageSequence
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata


def load(folder: Path, backend: str, device: str):
    """The model in float32 with eager attention, and its processor, which resizes pictures by that backend."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    processor.tokenizer.padding_side = "left"
    return model.eval().to(device), processor


def read_clip(path: Path) -> tuple[list[Image.Image], VideoMetadata]:
    """All frames of an animated picture, and how long they are shown."""
    frames, seconds = [], 0.0
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            frames.append(frame.convert("RGB"))
            seconds += frame.info["duration"] / 1000
    fps = len(frames) / seconds
    metadata = VideoMetadata(
        total_num_frames=len(frames), fps=fps, duration=seconds, frames_indices=list(range(len(frames)))
    )
    return frames, metadata


def inputs_of(processor, folder: Path, records: list[dict]):
    """What the model takes for requests of one kind, whose paths are relative to `folder`."""
    kind = "video" if "video" in records[0] else "image"
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": r["prompt"]}]}],
            add_generation_prompt=True,
        )
        for r in records
    ]
    if kind == "video":
        frames, metadata = zip(*(read_clip(folder / r["video"]) for r in records))
        visual = {"videos": list(frames), "video_metadata": list(metadata)}
    else:
        visual = {"images": [Image.open(folder / r["image"]).convert("RGB") for r in records]}
    return processor(text=texts, return_tensors="pt", padding=True, **visual)


@torch.no_grad()
def answer(model, processor, folder: Path, records: list[dict], limit: int | None) -> list[dict]:
    """Greedy answers to a batch of requests whose paths are relative to `folder`."""
    inputs = inputs_of(processor, folder, records).to(model.device)
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if limit:
        settings["max_new_tokens"] = limit
    out = model.generate(**inputs, **settings)
    start = inputs["input_ids"].shape[1]
    top = torch.stack([step.float().topk(2).values for step in out.logits], 1)  # (records, steps, 2)
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos)
    found = []
    for i, record in enumerate(records):
        ids = out.sequences[i, start:].tolist()
        end = next((k for k, token in enumerate(ids) if token in ends), len(ids) - 1)
        ids = ids[: end + 1]
        gap = (top[i, : len(ids), 0] - top[i, : len(ids), 1]).min().item()
        found.append(
            {
                **record,
                "input_ids_length": int(inputs["attention_mask"][i].sum()),
                "token_ids": ids,
                "text": processor.tokenizer.decode(ids, skip_special_tokens=True).strip(),
                "min_top2_gap": round(gap, 5),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--requests", type=Path, nargs="+", required=True, help="JSONL of {id, image or video, prompt}")
    parser.add_argument("--out", type=Path, help="file for the predictions, JSONL of {id, text}")
    parser.add_argument("--reference", type=Path, help="file for the full reference, JSON")
    parser.add_argument("--count", type=int, help="how many requests in all, spread over the files")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, help="default: the checkpoint's choice")
    parser.add_argument("--backend", choices=("torchvision", "pil"), default="torchvision", help="what resizes pictures")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = load(options.model, options.backend, device)
    found: list[dict] = []
    for k, path in enumerate(options.requests):
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if options.count:
            files = len(options.requests)
            share = options.count // files + (k < options.count % files)
            records = [records[i * len(records) // share] for i in range(share)]
        for i in range(0, len(records), options.batch):
            found += answer(model, processor, path.parent, records[i : i + options.batch], options.max_new_tokens)
            print(f"{path.name}: {min(i + options.batch, len(records))} of {len(records)}", flush=True)
    if options.out:
        lines = [json.dumps({"id": f["id"], "text": f["text"]}) + "\n" for f in found]
        options.out.write_text("".join(lines))
    if options.reference:
        options.reference.parent.mkdir(parents=True, exist_ok=True)
        options.reference.write_text("[\n" + ",\n".join(json.dumps(f) for f in found) + "\n]\n")


if __name__ == "__main__":
    main()

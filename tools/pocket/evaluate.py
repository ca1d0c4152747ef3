"""Answers request files with transformers (greedy, float32), for scoring and as a reference for other programs.

    python3 evaluate.py --model pocket-llava --requests heldout/captions.jsonl --out captions.pred.jsonl
    python3 evaluate.py --model pocket-llava --reference reference/greedy_fp32.json --requests A.jsonl B.jsonl --count 50

Predictions are lines {"id", "text"}. A reference also holds the prompt, the number of input ids, the generated ids
and the smallest gap between the two best logits on the way.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor


def load(folder: Path, device: str):
    """The model in float32 with eager attention, and its processor on the PIL image path."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    settings = json.loads((folder / "processor_config.json").read_text())
    processor = LlavaProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        patch_size=settings["patch_size"],
        vision_feature_select_strategy=settings["vision_feature_select_strategy"],
        chat_template=(folder / "chat_template.jinja").read_text(),
        image_token=settings["image_token"],
        num_additional_image_tokens=settings["num_additional_image_tokens"],
    )
    return model.eval().to(device), processor


def render(processor, prompt: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


@torch.no_grad()
def answer(model, processor, folder: Path, records: list[dict], limit: int) -> list[dict]:
    """Greedy answers to a batch of requests whose image paths are relative to `folder`."""
    texts = [render(processor, r["prompt"]) for r in records]
    images = [Image.open(folder / r["image"]).convert("RGB") for r in records]
    inputs = processor(images=images, text=texts, return_tensors="pt", padding=True).to(model.device)
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=limit, return_dict_in_generate=True, output_logits=True
    )
    start = inputs["input_ids"].shape[1]
    top = torch.stack([step.float().topk(2).values for step in out.logits], 1)  # (records, steps, 2)
    found = []
    for i, record in enumerate(records):
        ids = out.sequences[i, start:].tolist()
        eos = model.generation_config.eos_token_id
        ids = ids[: ids.index(eos) + 1] if eos in ids else ids
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
    parser.add_argument("--requests", type=Path, nargs="+", required=True, help="JSONL of {id, image, prompt}")
    parser.add_argument("--out", type=Path, help="file for the predictions, JSONL of {id, text}")
    parser.add_argument("--reference", type=Path, help="file for the full reference, JSON")
    parser.add_argument("--count", type=int, help="how many requests in all, spread over the files")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = load(options.model, device)
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

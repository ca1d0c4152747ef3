#!/usr/bin/env python3
"""Makes tests/runtime/data/thin_pictures.json: what the reference makes of lines of 4000 pixels.

    python tests/runtime/make_thin_golden.py

Needs torch, torchvision and transformers 5.23. Of a golden checkpoint of each family: the prompt of its
first case, a picture a pixel high or wide, whose bytes are 7 i mod 256, and 16 greedy tokens; or that
the processor refuses the picture.
"""

import json
import pathlib

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "golden"
OUT = HERE / "data" / "thin_pictures.json"
FOLDERS = ["llava_gqa", "llava_next", "llava_next_mistral", "llava_onevision", "internvl", "internvl_qwen3",
           "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
TOKENS = 16


def main():
    torch.set_num_threads(1)
    cases = []
    for folder in FOLDERS:
        prompt = json.loads((GOLDEN / folder / "manifest.json").read_text())["cases"][0]["prompt"]
        processor = AutoProcessor.from_pretrained(GOLDEN / folder)
        bos = processor.tokenizer.bos_token
        options = {"add_special_tokens": bos is None or not prompt.startswith(bos)}  # as apply_chat_template
        model = AutoModelForImageTextToText.from_pretrained(
            GOLDEN / folder, dtype=torch.float32, attn_implementation="eager")
        for height, width in ((1, 4000), (4000, 1)):
            values = np.arange(height * width * 3).reshape(height, width, 3) * 7 % 256
            case = {"folder": folder, "height": height, "width": width}
            try:
                inputs = processor(text=[prompt], images=[Image.fromarray(values.astype(np.uint8))],
                                   return_tensors="pt", **options)
            except ValueError as error:
                cases.append(case | {"refused": str(error)})
                continue
            rows = inputs["input_ids"].shape[1]
            tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, rows:]
            cases.append(case | {"prompt_tokens": rows, "greedy_ids": tokens.tolist()})
    lines = ",\n ".join(json.dumps(case) for case in cases)
    OUT.write_text(f"[{lines}]\n")


if __name__ == "__main__":
    main()

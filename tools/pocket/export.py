"""Writes a trained pocket model as a Hugging Face LLaVA-1.5 checkpoint folder."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

import draw

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# The template of the LLaVA-1.5 checkpoints in Hugging Face format: role, images, texts each followed by a space.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{# Render all text next #}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

PREPROCESSOR = {
    "crop_size": {"height": draw.PAGE, "width": draw.PAGE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": list(CLIP_MEAN),
    "image_processor_type": "CLIPImageProcessor",
    "image_std": list(CLIP_STD),
    "processor_class": "LlavaProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": draw.PAGE},
}
PROCESSOR = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": draw.PATCH,
    "processor_class": "LlavaProcessor",
    "vision_feature_select_strategy": "default",
}


def save(model: LlavaForConditionalGeneration, tokenizer_folder: Path, out: Path) -> None:
    """Writes weights (bf16, shards under 14 MB), configuration, tokenizer, processor and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16).save_pretrained(out, max_shard_size="14MB")
    _use_hub_names(out)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer_folder / name, out / name)
    for name, value in (("preprocessor_config.json", PREPROCESSOR), ("processor_config.json", PROCESSOR)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for path in out.iterdir():
        path.chmod(0o644)


def _use_hub_names(out: Path) -> None:
    """Renames the tower's weights as released LLaVA-1.5 checkpoints have them; recent libraries save a shorter form."""

    def rename(name: str) -> str:
        head, tail = "vision_tower.", "vision_tower.vision_model."
        return tail + name.removeprefix(head) if name.startswith(head) and not name.startswith(tail) else name

    for path in sorted(out.glob("*.safetensors")):
        save_file({rename(k): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    index = out / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(index.read_text())
        value["weight_map"] = {rename(k): v for k, v in sorted(value["weight_map"].items())}
        index.write_text(json.dumps(value, indent=2) + "\n")

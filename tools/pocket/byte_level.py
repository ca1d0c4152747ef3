"""Trains the byte-level tokenizer that pocket-internvl and pocket-qwen share, in the pipeline of Qwen2.

    python3 byte_level.py --family internvl --out FOLDER

NFC, the split of Qwen2 (digits one by one), byte-level BPE, then the added tokens of the family. Codes and marks enter
the training text letter by letter, so no merge crosses between capitals and the model reads them character by
character. Vocabularies are filled up to VOCAB_SIZE rows, as published ones are.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import clips
import scenes
import tokenizer

BASE, VOCAB_SIZE = 752, 768
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FAMILY_TOKENS = {
    "internvl": ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "qwen": ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
}


def added_tokens(family: str) -> dict[str, int]:
    return {token: BASE + i for i, token in enumerate((END_OF_TEXT, START, END, *FAMILY_TOKENS[family]))}


def training_text() -> list[str]:
    """The text of the sentencepiece tokenizer, clips, and the fixed words of the chat templates."""
    lines = [
        part.strip() for line in tokenizer.training_text() for part in line.removeprefix("USER: ").split(" ASSISTANT:")
    ]
    rng = random.Random(scenes.FIRST_TRAINING_SEED)
    for _ in range(2500):
        clip = clips.make_clip(rng)
        lines.append(tokenizer.spelled(clips.description(clip)))
        for ask, answers in clips.questions(clip, rng, 2):
            lines += [tokenizer.spelled(ask), tokenizer.spelled(answers[0])]
    for word in clips.CAPTION_PROMPTS:
        lines += [word] * 200
    return lines + ["system\nYou are a helpful assistant.\nuser\nassistant\n"] * 200


def _special(content: str) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def tokenizer_config(family: str) -> dict:
    """tokenizer_config.json in the form of Qwen2's and, for InternVL, the names that its processor asks for."""
    tokens = added_tokens(family)
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {**_special(t), "special": True} for t, i in tokens.items()},
        "additional_special_tokens": list(tokens)[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "errors": "replace",
        **({"extra_special_tokens": named, **named} if family == "internvl" else {}),
        "model_max_length": 2048,
        "pad_token": END_OF_TEXT,
        "processor_class": {"internvl": "InternVLProcessor", "qwen": "Qwen2_5_VLProcessor"}[family],
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def special_tokens_map(family: str) -> dict:
    return {
        "additional_special_tokens": list(added_tokens(family))[1:],
        "eos_token": _special(END),
        "pad_token": _special(END_OF_TEXT),
    }


def write_settings(out: Path, family: str) -> None:
    """Writes tokenizer_config.json and special_tokens_map.json."""
    for name, value in (("tokenizer_config", tokenizer_config(family)), ("special_tokens_map", special_tokens_map(family))):
        (out / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train(out: Path, family: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.train_from_iterator(
        training_text(),
        trainers.BpeTrainer(
            vocab_size=BASE, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        ),
    )
    if made.get_vocab_size() != BASE:
        raise SystemExit(f"pocket: the text gives {made.get_vocab_size()} of {BASE} entries")
    tokens = added_tokens(family)
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens])
    if {t: made.token_to_id(t) for t in tokens} != tokens:
        raise SystemExit("pocket: an added token has another id")
    out.mkdir(parents=True, exist_ok=True)
    made.save(str(out / "tokenizer.json"))
    write_settings(out, family)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILY_TOKENS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json to")
    options = parser.parse_args()
    train(options.out, options.family)

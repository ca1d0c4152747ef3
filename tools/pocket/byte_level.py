"""Trains the byte-level tokenizer that pocket-internvl and pocket-qwen share, in the pipeline of Qwen2.

    python3 byte_level.py --family internvl --out FOLDER

NFC, the split of Qwen2 (digits one by one), byte-level BPE, then the added tokens of the family. Codes and marks enter
the training text letter by letter, so no merge crosses between capitals and the model reads them character by
character. Vocabularies are filled up to VOCAB_SIZE rows, as published ones are.
"""

from __future__ import annotations

import argparse
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


def train(out: Path, family: str) -> None:
    """Writes tokenizer.json."""
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILY_TOKENS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json to")
    options = parser.parse_args()
    train(options.out, options.family)

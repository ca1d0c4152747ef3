"""Trains the pocket tokenizer and writes it in both forms that LLaVA checkpoints carry.

    python3 tokenizer.py --out FOLDER

`tokenizer.model` is a sentencepiece BPE with byte fallback, `tokenizer.json` the same vocabulary and merges in the
legacy LLaMA pipeline (every piece of text gets a leading U+2581). Codes, prices, dates and marks enter the training
text letter by letter, so no merge crosses from digit to digit or between capitals, and the model reads them
character by character. `<image>` and `<pad>` follow the sentencepiece vocabulary.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path

import documents
import scenes

PIECES = 766  # sentencepiece vocabulary: <unk>, <s>, </s>, 256 bytes, 507 pieces
IMAGE_TOKEN, PAD_TOKEN = "<image>", "<pad>"
IMAGE_ID, PAD_ID = PIECES, PIECES + 1
VOCAB_SIZE = PIECES + 2
BOS_ID, EOS_ID = 1, 2


def training_text(scene_count: int = 3000, document_count: int = 6000) -> list[str]:
    """Lines like those of the task, with everything that must be spelled out put letter by letter."""
    lines: list[str] = []
    rng = random.Random(scenes.FIRST_TRAINING_SEED)
    for _ in range(scene_count):
        scene = scenes.make_scene(rng, 3)
        lines.append(rng.choice(scenes.captions(scene)))
        for ask, answers in scenes.questions(scene, rng, 2):
            lines.append(f"USER: {ask} ASSISTANT: {answers[0]}")
    for _ in range(document_count):
        doc = documents.make_document(rng)
        for ask, answers in rng.sample(doc.questions, 3):
            lines += [f"USER: {ask} ASSISTANT:", answers[0]]
    for word in (*scenes.CAPTION_PROMPTS, *[f"\n{p}" for p in scenes.CAPTION_PROMPTS]):
        lines += [word.strip()] * 200
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:;!?$-/()'\"&%+#@*=_"
    lines += [" ".join(alphabet)] * 20
    return [spelled(line) for line in lines]


def spelled(line: str) -> str:
    """A line with its codes, numbers and runs of capitals put letter by letter."""
    return " ".join(_spell(word) for word in line.split(" "))


def _spell(word: str) -> str:
    """Spells out a word that holds a digit or two capitals side by side."""
    code = any(c.isdigit() for c in word) or sum(c.isupper() for c in word.strip(":")) > 1
    return " ".join(word) if code and word.strip(":") not in ("USER", "ASSISTANT") else word


def train(out: Path) -> None:
    """Writes tokenizer.model, tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_text()),
        model_writer=model,
        model_type="bpe",
        vocab_size=PIECES,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=-1,
        num_threads=1,
        minloglevel=1,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    _write_json(out / "tokenizer.json", tokenizer_json(processor))
    _write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(out / "special_tokens_map.json", SPECIAL_TOKENS)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_json(processor) -> dict:
    """The fast form of a sentencepiece model: same ids, merges in the order of the merged piece's rank."""
    count = processor.get_piece_size()
    vocab = {processor.id_to_piece(i): i for i in range(count)}
    ordinary = [
        i for i in range(count) if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    ]
    merges = []
    for i in sorted(ordinary, key=lambda i: -processor.get_score(i)):
        piece = processor.id_to_piece(i)
        merges += [[piece[:k], piece[k:]] for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
    added = [("<unk>", 0), ("<s>", BOS_ID), ("</s>", EOS_ID), (IMAGE_TOKEN, IMAGE_ID), (PAD_TOKEN, PAD_ID)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, i in added
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<s>", "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _special(content: str) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


SPECIAL_TOKENS = {
    "additional_special_tokens": [_special(IMAGE_TOKEN)],
    "bos_token": _special("<s>"),
    "eos_token": _special("</s>"),
    "pad_token": _special(PAD_TOKEN),
    "unk_token": _special("<unk>"),
}
TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": None,
    "added_tokens_decoder": {
        str(i): {**_special(content), "special": True}
        for content, i in (("<unk>", 0), ("<s>", 1), ("</s>", 2), (IMAGE_TOKEN, IMAGE_ID), (PAD_TOKEN, PAD_ID))
    },
    "additional_special_tokens": [IMAGE_TOKEN],
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "image_token": IMAGE_TOKEN,
    "legacy": True,
    "model_max_length": 2048,
    "pad_token": PAD_TOKEN,
    "padding_side": "left",
    "processor_class": "LlavaProcessor",
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
    "use_default_system_prompt": False,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the pocket tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tokenizer files to")
    train(parser.parse_args().out)

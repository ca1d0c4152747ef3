"""What the exporters of all families share: drawn weights and pictures, tokenizers, recording.

A family's module builds checkpoints with it (README.md beside this file); nothing here knows a family.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import PIL
import PIL.Image
import safetensors
import safetensors.torch
import sentencepiece
import tokenizers
import torch
import torchvision
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

GREEDY_STEPS = 32
GREEDY_LOGIT_STEPS = 4
MIN_GAP = (
    0.02  # top-1 minus top-2 at every recorded step; float arithmetic is far below a 20th of it
)


Result = TypeVar("Result")


class ExportError(Exception):
    """A golden that cannot be made; the message is one sentence that says which check failed."""


def require(condition: bool, message: str) -> None:
    """Raises ExportError(message) unless the condition holds."""
    if not condition:
        raise ExportError(message)


# ---------------------------------------------------------------- random weights and images


def generator(seed: int, label: str, device: torch.device) -> torch.Generator:
    """A generator that depends on the seed and the label only, not on the order of drawing."""
    digest = hashlib.sha256(f"{seed}:{label}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


POSITION_TABLES = ("class_embedding", "position_embedding", "cls_token", "pos_embed.")


def redraw(model: torch.nn.Module, seed: int, quiet_rows: Iterable[int], loud_row: int = 2) -> None:
    """Draws every parameter anew, so that no bias, norm or position table is trivial.

    Matrices N(0, 1.2^2 / fan_in), biases and norm biases N(0, 0.1^2), norm weights 1 + N(0, 0.2^2),
    layer scales uniform in 0.5 to 1.5, token embeddings and image_newline N(0, 1), class and
    position tables N(0, 0.5^2), lm_head (and token embeddings tied to it) N(0, 9 / width). The rows
    of lm_head in `quiet_rows` (ids without a printable token) are scaled down so that they never
    win; `loud_row` (eos) is scaled up.
    """
    names = {name for name, _ in model.named_parameters()}
    tied = not any(name.endswith("lm_head.weight") for name in names)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            device = parameter.device
            noise = torch.randn(
                parameter.shape, generator=generator(seed, name, device), device=device
            )
            if name.endswith("lm_head.weight") or (tied and name.endswith("embed_tokens.weight")):
                noise *= 3.0 / parameter.shape[1] ** 0.5
                noise[list(quiet_rows)] *= 0.1
                noise[loud_row] *= 1.5  # eos wins now and then, so that a natural end can be found
            elif ".lambda_" in name:
                noise = 0.5 + torch.rand(
                    parameter.shape, generator=generator(seed, name, device), device=device
                )
            elif "norm" in name or ".ln_q." in name:
                noise = 1.0 + 0.2 * noise if name.endswith("weight") else 0.1 * noise
            elif name.endswith(("embed_tokens.weight", "image_newline")):
                pass
            elif any(table in name for table in POSITION_TABLES):
                noise *= 0.5
            elif name.endswith("bias"):
                noise *= 0.1
            else:
                fan_in = parameter[0].numel()
                noise *= 1.2 / fan_in**0.5
            parameter.copy_(noise)


def synthetic_image(width: int, height: int, seed: int) -> np.ndarray:
    """Gradients, a disc and seeded noise: (height, width, 3) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    x /= max(width - 1, 1)
    y /= max(height - 1, 1)
    base = np.stack([220 * x, 220 * y, 220 * (1 - 0.5 * x - 0.5 * y)], axis=-1)
    centre = rng.uniform(0.25, 0.75, size=2)
    inside = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < rng.uniform(0.03, 0.1)
    base[inside] = rng.uniform(0, 255, size=3)
    noise = rng.integers(-18, 19, size=base.shape)
    return np.clip(np.floor(base + 18) + noise, 0, 255).astype(np.uint8)


# ---------------------------------------------------------------- tokenizer

CORPUS = [
    "a small red circle is to the the one",
    "the is in the centre and there is no tree in it",
    "tell me the colours in the scene and the tiles",
    "the red circle is small and the rest is than the centre",
    "there are three circles in the scene and one them is the smallest",
    "this is a test the and the scene",
    "its colour is the colour the other one",
]
SENTENCEPIECE_SIZE = 300

# Strings every tokenizer is recorded on; the program must reproduce ids and both decodings.
TOKENIZER_TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "the scene",
    "  the  scene   is\tred ",
    "the\nred\n\ncircle\r\n",
    "USER: <image>\nwhat is in the scene? ASSISTANT:",
    "<image><image>",
    "<image> the <image>\nscene",
    "<s>",
    "hi<s>there",
    "the</s>the </s> the",
    "<pad><unk>the",
    "<imag e>",
    "<0x41> is a byte token in text",
    "naïve café, falsé",
    "生活的真谛是",
    "😊 👩‍🚀 ird ปี ด",
    "\u2581the\u2581 scene",
    "\u0000\u0001\u007f",
    "ththethethe the the",
    "3.14159 + 2 = 5.14159 (approx.) #!&%",
]


def train_sentencepiece(add_dummy_prefix: bool = True) -> bytes:
    """Trains the tiny sentencepiece BPE model with byte fallback and returns its protobuf bytes."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=out,
        model_type="bpe",
        vocab_size=SENTENCEPIECE_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return out.getvalue()


def llama_tokenizer(model_proto: bytes, legacy: bool, image_id: int) -> Tokenizer:
    """The tokenizer.json pipeline of a LLaMA checkpoint, built from a sentencepiece model.

    Ids between its pieces and image_id belong to words that no text becomes. legacy: a Prepend
    normalizer puts U+2581 before every piece between special tokens; otherwise a Metaspace
    pre-tokenizer puts it at the start of the text only.
    """
    sp = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
    pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[3 + 256 :]:  # in order of falling score
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [(a, b) for a, b in splits if a in vocab and b in vocab]
    vocab |= {f"\u2581word{i}": i for i in range(len(pieces), image_id)}

    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            "\u2581", prepend_scheme="first", split=False
        )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t in ("<unk>", "<s>", "</s>", "<image>", "<pad>")
        ]
    )
    require(
        [tokenizer.token_to_id(token) for token in ("<image>", "<pad>")]
        == [image_id, image_id + 1],
        f"the special tokens <image> and <pad> did not get ids {image_id} and {image_id + 1}.",
    )
    if legacy:  # the two implementations must agree wherever no special token occurs
        for text in TOKENIZER_TEXTS:
            if "<" not in text:
                ours = tokenizer.encode(text, add_special_tokens=False).ids
                require(
                    ours == sp.encode(text),
                    f"tokenizer.json and tokenizer.model disagree on {text!r}.",
                )
    return tokenizer


# ---------------------------------------------------------------- recording


def json_text(value: Any) -> str:
    """JSON with a stable layout and a final newline."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def utf8(text: str) -> torch.Tensor:
    """A string as a one-dimensional u8 tensor."""
    return (
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if text
        else torch.zeros(0, dtype=torch.uint8)
    )


class Golden:
    """Collects the tensors and the manifest of one folder and writes both."""

    def __init__(self, folder: Path, description: str, seed: int) -> None:
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}
        self.manifest: dict[str, Any] = {
            "format": 1,
            "description": description,
            "versions": {
                m.__name__: m.__version__.split("+")[0]
                for m in (
                    torch,
                    torchvision,
                    transformers,
                    tokenizers,
                    sentencepiece,
                    safetensors,
                    np,
                    PIL,
                )
            },
            "seed": seed,
            "cases": [],
        }

    def add(self, name: str, tensor: torch.Tensor | np.ndarray) -> None:
        """Adds one tensor; floats are stored as f32, integers as i64, bytes as u8."""
        tensor = torch.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().cpu()
        if tensor.dtype != torch.uint8:
            tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
        require(name not in self.tensors, f"the tensor {name} was recorded twice.")
        require(
            not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()),
            f"the tensor {name} of {self.folder.name} is not finite.",
        )
        self.tensors[name] = tensor.contiguous().clone()

    def write(self) -> None:
        """Writes golden.safetensors and manifest.json."""
        if self.tensors:
            safetensors.torch.save_file(self.tensors, self.folder / "golden.safetensors")
        self.manifest["config_sha256"] = sha256(self.folder / "config.json")
        weights = sorted(self.folder.glob("model*.safetensors"))
        self.manifest["weights_sha256"] = {path.name: sha256(path) for path in weights}
        self.manifest["tensors"] = {
            name: [
                {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}[t.dtype],
                list(t.shape),
            ]
            for name, t in sorted(self.tensors.items())
        }
        text = json_text(self.manifest)
        # One tensor per line keeps the list readable.
        compact = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in self.manifest["tensors"].items()
        )
        head = text[: text.index(' "tensors": {')]
        (self.folder / "manifest.json").write_text(
            head + ' "tensors": {\n' + compact + "\n }\n}\n", encoding="utf-8"
        )


@dataclasses.dataclass
class Greedy:
    """What greedy generation gave for one sequence."""

    ids: list[int]
    logits: torch.Tensor  # (steps, vocab) f32, before the logits processors
    scores: torch.Tensor  # (steps, vocab) f32, after them
    min_gap: float


def reset_rope(model: torch.nn.Module) -> None:
    """Forgets the frequencies that dynamic RoPE keeps from a longer sequence."""
    rotary = model.model.language_model.rotary_emb
    with torch.device(model.device):
        rotary.__init__(rotary.config)


def greedy(
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    *,
    steps: int = GREEDY_STEPS,
    repetition_penalty: float = 1.0,
    use_cache: bool = True,
) -> Greedy:
    """Runs the reference's own greedy generation on one sequence."""
    reset_rope(model)
    out = model.generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        repetition_penalty=repetition_penalty,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logits = torch.cat(out.logits)[: len(ids)].float()
    scores = torch.cat(out.scores)[: len(ids)].float()
    top = scores.topk(2, dim=-1).values
    return Greedy(ids, logits, scores, float((top[:, 0] - top[:, 1]).min()))


def usable(result: Greedy, *, eos_id: int = 2, want_eos: bool = False) -> bool:
    """Whether a run is fit to be a golden: clear winners, varied tokens, eos only where wanted."""
    if result.min_gap <= MIN_GAP:
        return False
    if want_eos:
        return result.ids[-1] == eos_id and 4 <= len(result.ids) < GREEDY_STEPS
    return eos_id not in result.ids and len(set(result.ids[:16])) >= 4


def first_usable(
    what: str, candidates: Iterable[int], attempt: Callable[[int], Result | None]
) -> tuple[int, Result]:
    """The first candidate whose attempt gives a result, with that result."""
    for candidate in candidates:
        result = attempt(candidate)
        if result is not None:
            return candidate, result
    raise ExportError(
        f"no candidate for {what} passed the checks; change the seed of the checkpoint."
    )


def record_tokenizer(golden: Golden, run: Any) -> None:
    """Writes tokenizer_cases.json: texts, ids with and without bos, and both decodings."""
    tokenizer = run.processor.tokenizer
    cases = []
    for text in TOKENIZER_TEXTS:
        ids = tokenizer(text)["input_ids"]
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        cases.append(
            {
                "text": text,
                "ids": ids,
                "ids_without_bos": bare,
                "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                "decoded_special": tokenizer.decode(ids, skip_special_tokens=False),
            }
        )
    lines = ",\n".join(" " + json.dumps(case, ensure_ascii=True) for case in cases)
    (golden.folder / "tokenizer_cases.json").write_text("[\n" + lines + "\n]\n")

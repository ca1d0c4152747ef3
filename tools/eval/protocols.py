"""How a harness asks and scores: prompts, token limits, size of images, metrics. Scores of two protocols do not compare.

Each is what the harness's own files do: lmms-eval at 75571cf, VLMEvalKit at e8e78f0, InternVL's evaluation at 2410d1d.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable

from errors import EvaluationError
from records import CAPTIONS, CHARTQA, DOCUMENTS, TEXTVQA, VIZWIZ, Item, Split

NAMES = ("native", "lmms-eval", "vlmevalkit", "internvl")

# Metrics, by the names of their packages; the raw ones are on untokenised strings, times 100.
COCO = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE_L", "CIDEr")
COCO_RAW = tuple(f"raw {name}" for name in ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE_L", "CIDEr"))

METRICS = {CHARTQA: ("relaxed accuracy", "human", "augmented"), TEXTVQA: ("VQA accuracy",), VIZWIZ: ("VQA accuracy",)}

ONE_SENTENCE = "Provide a one-sentence caption for the provided image."
SHORT = "\nAnswer the question using a single word or phrase."
QWEN_PIXELS = ("--min-pixels", str(256 * 28 * 28), "--max-pixels", "1605632")
VLMEVALKIT_TOKENS = {"internvl": 4096, "qwen3": 32768}  # others 2048
INSUFFICIENT = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."
LMMS_EVAL_TOKENS = {"qwen2": 128, "qwen2_5": 128, "qwen3": 128}  # of its model classes, where a task has no limit; others 1024
VLMEVALKIT_SUFFIX = {
    "internvl": SHORT,
    "qwen2": "\nPlease try to answer the question with short words or phrases if possible.",
    "qwen2_5": "\nPlease try to answer the question with short words or phrases if possible.",
    "qwen3": "\nPlease answer concisely with short words or phrases when possible.",
}


@dataclass(frozen=True)
class Protocol:
    """One harness's way with one task and one family of models."""

    name: str
    prompt: str | None  # {question}, {Question} (its first letter alone in upper case) and {choices} are the record's; None: the model's own captioning prompt
    max_tokens: int | None  # None: the checkpoint's choice
    flags: tuple[str, ...]  # of vlm-run, about the size of pictures and the number of frames
    metrics: tuple[str, ...]
    departs: str = ""  # what the harness does and these runs do not
    letter: Callable[[str], str] | None = None  # the letter that an answer chooses; "" for none
    forced_tokens: int = 128  # of a reference, at most
    answer: Callable[[str], str] = str.strip  # what of a model's text is scored

    def ask(self, item: Item) -> str | None:
        if self.prompt is None:
            return None
        words = {"{question}": item.question, "{Question}": item.question.capitalize(), "{choices}": "\n".join(item.choices)}
        return re.sub(r"\{[qQ]uestion\}|\{choices\}", lambda found: words[found[0]], self.prompt)


def find_protocol(name: str, split: Split, family: str) -> Protocol:
    """`name` is one of NAMES."""
    if split.task == CAPTIONS:
        return _captions(name, split, family)
    if split.task == DOCUMENTS:
        return _documents(name, split, family)
    if name == "internvl":
        raise EvaluationError(f"--protocol internvl has no way with {split.task}; there are native, lmms-eval and vlmevalkit")
    return (_lmms_eval_vqa if name == "lmms-eval" else _vlmevalkit_vqa if name == "vlmevalkit" else _native_vqa)(split, family)


def _native_vqa(split: Split, family: str) -> Protocol:
    return Protocol("native", "{question}", None, (), METRICS[split.task])


def _lmms_eval_vqa(split: Split, family: str) -> Protocol:
    prompts = {CHARTQA: "{question}\nAnswer the question with a single word.", TEXTVQA: "{Question}" + SHORT,
               VIZWIZ: "{Question}" + INSUFFICIENT + SHORT}  # fmt: skip
    tokens = 16 if split.task == CHARTQA else LMMS_EVAL_TOKENS.get(family, 1024)
    return Protocol("lmms-eval", prompts[split.task], tokens, _qwen_pixels(family), METRICS[split.task],
                    answer=_of_reasoning if family == "qwen3" else str.strip)  # fmt: skip


def _vlmevalkit_vqa(split: Split, family: str) -> Protocol:
    suffix = VLMEVALKIT_SUFFIX.get(family, "" if split.task == VIZWIZ else SHORT)
    tiles = ("--tiles", "12" if split.task == CHARTQA else "6") if family == "internvl" else ()
    return Protocol("vlmevalkit", "{question}" + suffix, VLMEVALKIT_TOKENS.get(family, 2048), tiles, METRICS[split.task])


def _of_reasoning(text: str) -> str:
    """What Qwen3-VL marks as its answer, if it marks one, as TGV-KV's copy of lmms-eval has it."""
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).strip()
    found = re.search(r"<answer>(.*?)</answer>|\\boxed\{(.*?)\}", text, re.DOTALL)
    return next(part for part in found.groups() if part is not None).strip() if found else text


def is_our_own(split: Split) -> bool:
    """Whether it is a held-out set of tools/pocket, whose facts our own scorer knows."""
    if split.task == CAPTIONS:
        return split.path.name == "captions_heldout.json" and (split.path.parent / "scene_facts.json").is_file()
    names = ("documents", "questions", "clips", CHARTQA, TEXTVQA, VIZWIZ)  # the last three of made_sets.py
    return split.path.name in [f"{name}_heldout.json" for name in names]


def _captions(name: str, split: Split, family: str) -> Protocol:
    tiles = ("--tiles",) if family == "internvl" else ()
    if split.items[0].box:
        if name not in ("native", "lmms-eval"):
            raise EvaluationError(f"--protocol {name} has no way with regions; there are native and lmms-eval")
        asked = (LMMS_EVAL_TOKENS.get(family, 1024), _qwen_pixels(family)) if name == "lmms-eval" else (None, ())
        return Protocol(name, "{question}", *asked, COCO)
    if name == "lmms-eval":
        prompt = "Describe the image briefly." if "karpathy" in split.name else ONE_SENTENCE
        return Protocol(name, prompt, 64 if split.scored else 128, _qwen_pixels(family), COCO)
    if name == "vlmevalkit":
        prompt = (
            "Please describe this image in general. Directly provide the description, do not include prefix like "
            '"This image depicts". '
        )
        return Protocol(name, prompt, VLMEVALKIT_TOKENS.get(family, 2048), (*tiles, "6") if tiles else (), COCO_RAW)
    if name == "internvl":
        return Protocol(name, ONE_SENTENCE, 30, (*tiles, "12") if tiles else (), COCO,
                        "its least of 8 tokens is not asked for, so that answers may be shorter")
    return Protocol(name, None, None, (), (("exact", "slots") if is_our_own(split) else ()) + COCO)


def _documents(name: str, split: Split, family: str) -> Protocol:
    tiles = ("--tiles", "18") if family == "internvl" else ()
    if name == "lmms-eval":
        return Protocol(name, "{question}" + SHORT, 32, _qwen_pixels(family), ("ANLS",))
    if name == "vlmevalkit":
        return Protocol(name, "{question}" + VLMEVALKIT_SUFFIX.get(family, SHORT), VLMEVALKIT_TOKENS.get(family, 2048),
                        tiles, ("ANLS",))
    if name == "internvl":
        return Protocol(name, "{question}" + SHORT, 100, tiles, ("ANLS",))
    return Protocol(name, "{question}", None, (), ("ANLS", "answers") if is_our_own(split) else ("ANLS",))


def _qwen_pixels(family: str) -> tuple[str, ...]:
    return QWEN_PIXELS if family.startswith("qwen") else ()

"""Answers held-out pages with the training forward pass, for a first figure right after training.

The text grows by one token for all records at once and is run anew each time, without a cache. evaluate.py and vlm-run
give the figures that count.
"""

from __future__ import annotations

import time

import torch

import batches
import clips
import draw
import heldout
import score

SETS = {
    "scenes": (batches.Group(draw.PAGE, draw.PAGE), 230),
    "documents": (batches.Group(draw.PAGE, draw.PAGE), 48),
    "questions": (batches.Group(draw.PAGE, draw.PAGE), 32),
    "clips": (batches.Group(draw.FRAME, draw.FRAME, frames=clips.FRAMES), 120),
}


@torch.no_grad()
def answers(family, runner, encode, device, name: str, records: list[heldout.Record]) -> list[str]:
    """Greedy answers to records of one set."""
    group, limit = SETS[name]
    layouts = [page for r in records for page in r.layouts]
    tables = draw.to_tensors(draw.tables(layouts), device)
    parts = family.cut(group, draw.Painter(device).paint(tables, group.height, group.width))
    ((visual, _),) = runner.see([group], [parts], eager=True)
    prompts = [encode.prompt(r.ask, first=True) for r in records]
    longest = max(map(len, prompts))
    ids = torch.full((len(records), longest + limit), encode.pad)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ids, prefix = ids.to(device), torch.tensor([encode.prefix], device=device)
    length = torch.tensor([len(p) for p in prompts], device=device)
    row = torch.arange(len(records), device=device)
    ended = torch.zeros(len(records), dtype=torch.bool, device=device)
    for step in range(limit):
        shown = ids[:, : longest + step]
        (logits,) = runner.read([group], [visual], prefix, [shown], eager=True)
        best = logits[row, length - 1].argmax(-1)
        ended |= best == encode.end
        ids[row[~ended], length[~ended]] = best[~ended]
        length += (~ended).long()
        if step % 8 == 0 and bool(ended.all()):
            break
    return [encode.decode(ids[i, len(p) : length[i]].tolist()).strip() for i, p in enumerate(prompts)]


def report(family, runner, encode, device, count: int) -> None:
    """Prints a line for each set that the family learns, and some wrong answers."""
    begin = time.time()
    for name in SETS:
        if name == "clips" and family.FAMILY != "qwen":
            continue
        records = [heldout.record(name, i) for i in range(min(count, heldout.CLIP_COUNT if name == "clips" else count))]
        texts = answers(family, runner, encode, device, name, records)
        right = [text in r.answers if name == "scenes" else score.is_answer(text, r.answers) for text, r in zip(texts, records)]
        similar = sum(score.anls(text, r.answers) for text, r in zip(texts, records)) / len(records)
        line = f"HELD OUT {family.NAME} {name}: {sum(right)} of {len(right)} right, ANLS {similar:.4f}"
        if name == "clips" and count > heldout.DESCRIBED_CLIPS:
            line += f", descriptions {sum(right[: heldout.DESCRIBED_CLIPS])} of {heldout.DESCRIBED_CLIPS}"
        print(f"{line}, {time.time() - begin:.0f} s", flush=True)
        wrong = [(r.key, r.ask, text, r.answers[0]) for r, text, good in zip(records, texts, right) if not good]
        for key, ask, text, wanted in wrong[:6]:
            print(f"    wrong {key} {ask!r}: {text!r} instead of {wanted!r}", flush=True)

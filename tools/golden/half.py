"""Goldens of a checkpoint with half-precision weights, of any family."""

from __future__ import annotations

from typing import Any

import torch
from cases import Cases, Keep, Request, Run, check_pictures_matter, record, search
from common import Golden

# Taps that are recorded, of a clip too: the first layers show where a difference begins, the last
# ones how large it became.
KEPT_TAPS = frozenset(
    ["projector_out", "inputs_embeds", "llm.layer.0", "llm.layer.1", "llm.norm"]
    + ["vision.patch_embed", "vision.embeddings", "vision.layer.0", "vision.layer.1"]
    + ["vision.selected", *(f"deepstack.{k}" for k in range(3))]
)


def keep_taps(taps: dict[str, torch.Tensor]) -> None:
    """Names the tower's last block vision.selected where no family has, drops what is not kept."""
    for prefix in ("", "video."):
        blocks = [name for name in taps if name.startswith(f"{prefix}vision.layer.")]
        if blocks:
            taps.setdefault(f"{prefix}vision.selected", taps[blocks[-1]])
    for name in list(taps):
        activation = taps[name].is_floating_point() and name != "logits_prefill"
        if activation and name.removeprefix("video.") not in KEPT_TAPS:
            del taps[name]


def forced_logits(run: Run, request: Request, ids: list[int]) -> torch.Tensor:
    """Logits at the last prompt row and after each of the ids but the last, fed in one pass."""
    inputs: dict[str, Any] = run.inputs(request)
    rows = inputs["input_ids"].shape[1]
    answer = torch.tensor([ids[:-1]], device=run.model.device)
    for name, added in (
        ("input_ids", answer),
        ("attention_mask", torch.ones_like(answer)),
        ("mm_token_type_ids", torch.zeros_like(answer)),
    ):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], added], dim=1)
    return run.taps(inputs)["logits_prefill"][rows - 1 :]


def describe_difference(golden: Golden, case: str) -> None:
    """Says in the manifest how far the half type is from fp32 arithmetic."""
    exact, rough = (golden.tensors[f"{case}.{p}forced_logits"] for p in ("", "half."))
    entry = golden.manifest["cases"][-1]
    entry["half_max_error"] = round(float((exact - rough).abs().max()), 5)
    same = exact.argmax(-1) == rough.argmax(-1)
    entry["half_top1_agreement"] = round(float(same.float().mean()), 5)
    kl = torch.nn.functional.kl_div(
        rough.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
    )
    entry["half_mean_kl"] = float(f"{float(kl.sum(-1).mean()):.3e}")


def record_half(cases: Cases, half: Run) -> None:
    """Records one picture, one clip and one text, and writes the folder's goldens.

    cases has the reference in fp32 arithmetic on the rounded weights, half the same checkpoint in
    its own type; what that gives has the prefix half.
    """
    golden, run, seed = cases.golden, cases.run, cases.seed

    def extra(inputs: dict[str, Any], taps: dict[str, torch.Tensor]) -> None:
        cases.reorder(inputs, taps)
        keep_taps(taps)

    makers = [
        ("one_image", cases.one),
        ("video", cases.described),
        ("text_only", lambda number: cases.text(number - seed)),
    ]
    for kind, make in makers:
        if not cases.wants(kind):
            continue
        request, result = search(run, kind, seed, make)
        if request.images or request.videos:
            check_pictures_matter(run, request, result)
        keep = Keep(pixels=True, logits=False)
        case = record(golden, run, kind, request, result, keep, extra=extra)
        inputs = half.inputs(request)
        taps = half.taps(inputs)
        extra(inputs, taps)
        for name, tensor in taps.items():
            if tensor.is_floating_point() and name != "logits_prefill":
                golden.add(f"{case}.half.{name}", tensor)
        for prefix, which in (("", run), ("half.", half)):
            logits = forced_logits(which, request, result.ids)
            golden.add(f"{case}.{prefix}forced_logits", logits)
        describe_difference(golden, case)
    golden.write()

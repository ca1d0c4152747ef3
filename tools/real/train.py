"""Trains what joins the two halves of smol-internvl: the projector, and adapters (LoRA) of decoder and tower.

    python3 train.py --out ADAPTERS                      # ranks and time of tools/real/adapters
    python3 train.py --out ADAPTERS --text TEXT.jsonl    # keeps the decoder's plain English, too
    python3 convert.py --packages build/real/packages --adapters ADAPTERS --out FOLDER

The data are the drawn pages of tools/pocket, and so is most of the code: data, forward pass, linear heads on the tower's
features. Stage 1 learns captions and questions, scenes of two objects first, then four, then eight; stage 2 brings documents.
With --text (sample.py writes it) every step also learns the logits of the original decoder on some plain text, against
forgetting. Made for one GPU, where a step of 96 pages is compiled; --tiny tries the code on a CPU with few layers.

`--seconds` counts from the first steps on, without start and compiling. Needs torch, transformers, tokenizers, pillow and
matplotlib, and smollm2 as get.sh makes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/pocket"))  # before this folder, whose train.py is __main__

import argparse
import json
import os
import time
from dataclasses import dataclass

import batches
import conversations
import decoder
import draw
import internvl
import pages
import scenes
import torch
import torch.nn.functional as F
import train as pocket
from safetensors.torch import save_file
from transformers import InternVLConfig, InternVLForConditionalGeneration

SCALE = 2.0  # of the adapters, as convert.py merges them
TILE = 448
SIDE = TILE // pages.PATCH
DECODER = "model.language_model."
TEXT_LENGTH = 256  # tokens of a plain text
WARMUP = 5  # steps in which kernels are compiled


@dataclass(frozen=True)
class Stage:
    """Pages of each kind in a step; part of the time; learning rate, constant for the part `hold`, then falling to nothing."""

    captions: int
    questions: int
    documents: int
    share: float
    lr: float
    hold: float

    def group(self, divisor: int) -> batches.Group:
        kinds = {kind: -(-getattr(self, kind) // divisor) for kind in ("captions", "questions", "documents")}
        return batches.Group(draw.PAGE, draw.PAGE, **kinds)


STAGES = (Stage(64, 32, 0, share=0.58, lr=1e-3, hold=0.5), Stage(32, 16, 48, share=0.42, lr=7e-4, hold=0.4))
SEEDS = 50_000_000  # between the stages


# --- Pages as one tile of 448 px, for batches.Feed and pocket.Prefetch ------------------------------------------------
def grid(group: batches.Group) -> tuple[int, int]:
    return SIDE, SIDE


class Family:
    @staticmethod
    def cut(group, pixels):
        tiles = pages.normalise(pages.resize(pixels, TILE, TILE), pages.IMAGENET_MEAN, pages.IMAGENET_STD)
        return (tiles.bfloat16() if tiles.is_cuda else tiles)[:, None]

    @staticmethod
    def labels(group, characters, objects):
        return torch.cat((characters, objects), -1)


# --- Model --------------------------------------------------------------------------------------------------------------
def build(base: Path, tiny: bool) -> InternVLForConditionalGeneration:
    """smollm2 in float32, nothing of it trained; tiny: the first two layers of the decoder and the first of the tower."""
    config = InternVLConfig.from_pretrained(base)
    if tiny:
        config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers = 2, 1
        config.text_config.layer_types = None
    model = InternVLForConditionalGeneration.from_pretrained(base, config=config, dtype=torch.float32).requires_grad_(False)
    model.model.multi_modal_projector.linear_2.weight.mul_(0.25)  # visual tokens of 0.43 RMS, not 1.7; words have 0.14
    return model


class Runner(internvl.Runner):
    """The forward pass of training, in which the matrices of both stacks may have adapters."""

    def __init__(self, model, dtype: torch.dtype, compiled: bool, rank: int, tower_rank: int):
        super().__init__(model, dtype, compiled)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.adapters: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self.original = [self._adapted(layer, 0) for layer in self.decoder.weights]
        self.decoder.weights = [self._adapted(layer, rank) for layer in self.decoder.weights]
        self.weights = [self._adapted(layer, tower_rank) for layer in self.weights]
        self.projector.requires_grad_(True)

    def _adapted(self, layer: list[torch.Tensor | None], rank: int) -> list:
        """Weights of a layer, each matrix as decoder.linear takes it: (matrix, a, b, scale)."""
        made = []
        for w in layer:
            if w is None or w.ndim != 2:
                made.append(w)
                continue
            made.append(w.to(self.dtype))
            if rank:
                a = torch.nn.Parameter(torch.empty(rank, w.shape[1], device=w.device).uniform_(-1, 1) * w.shape[1] ** -0.5)
                b = torch.nn.Parameter(torch.zeros(w.shape[0], rank, device=w.device))
                self.adapters[self.names[w]] = a, b
                made[-1] = made[-1], a, b, SCALE
        return made

    def learned(self) -> list[torch.nn.Parameter]:
        return [*(p for pair in self.adapters.values() for p in pair), *self.projector.parameters()]

    def logits(self, x: torch.Tensor, chosen: torch.Tensor, weights: list, run=None) -> torch.Tensor:
        """Logits (tokens, vocabulary) f32 at the `chosen` (batch, last) of the last positions of x (batch, tokens, width) f32."""
        d = self.decoder
        cos, sin = decoder.angles(torch.arange(x.shape[1], device=x.device), self.theta)
        for layer in weights:
            x = (run or d.run)(x, cos, sin, d.q_heads, d.kv_heads, d.eps, d.dtype, *layer)
        x = decoder.rms_norm(x[:, -chosen.shape[1] :][chosen], d.text.norm.weight, d.eps)
        return decoder.linear(x.to(d.dtype), d.head.weight).float()

    def save(self, folder: Path) -> None:
        """The two files that convert.py reads: NAME.a and NAME.b of each adapted matrix, and the projector, in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        named = {f"{name}.{part}": p for name, pair in self.adapters.items() for part, p in zip("ab", pair)}
        named |= {self.names[p]: p for p in self.projector.parameters()}
        named = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in named.items()}
        if not all(bool(p.isfinite().all()) for p in named.values()):
            raise SystemExit(f"train.py: weights are no longer finite; {folder} keeps what was saved before; try a smaller --lr-scale")
        for part, chosen in (("decoder", True), ("vision", False)):
            values = {name: p for name, p in named.items() if name.startswith(DECODER) == chosen}
            save_file(values, folder / f"adapter-{part}.safetensors")


class PlainText:
    """Texts of a file, some a step: the distance (KL) of the decoder's next tokens from the original decoder's."""

    def __init__(self, path: Path, encode: conversations.Encoder, count: int, device: torch.device):
        texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        ids = torch.full((len(texts), TEXT_LENGTH), encode.pad)
        self.shown = torch.zeros(len(texts), TEXT_LENGTH, dtype=torch.bool)
        for i, text in enumerate(texts):
            found = encode.tokenizer.encode(text, add_special_tokens=False).ids[:TEXT_LENGTH]
            ids[i, : len(found)], self.shown[i, : len(found)] = torch.tensor(found), True
        self.ids, self.shown, self.count = ids.to(device), self.shown.to(device), count

    def loss(self, runner: Runner) -> torch.Tensor:
        chosen = torch.randint(len(self.ids), (self.count,), device=self.ids.device)
        x, shown = runner.decoder.embed(self.ids[chosen]), self.shown[chosen]
        with torch.no_grad():
            wanted = runner.logits(x, shown, runner.original).log_softmax(-1)
        found = runner.logits(x, shown, runner.decoder.weights).log_softmax(-1)
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


# --- Training -------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def check(runner: Runner, group: batches.Group, prefix, tiles, ids) -> None:
    """The forward pass against the module's own, while the adapters add nothing."""
    every = torch.ones_like(ids, dtype=torch.bool)
    x = embedded(runner, prefix, runner.see([group], [tiles], eager=True)[0][0], ids)
    ours = runner.logits(x, every, runner.decoder.weights, run=decoder.block).unflatten(0, ids.shape)
    theirs = runner.reference(group, tiles.float(), prefix, ids)
    print(f"relative difference of the logits from transformers {((ours - theirs).norm() / theirs.norm()).item():.1e}", flush=True)


def embedded(runner: Runner, prefix, visual, ids) -> torch.Tensor:
    return torch.cat((runner.decoder.embed(prefix).expand(len(ids), -1, -1), visual, runner.decoder.embed(ids)), 1)


def train(options: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    encode = conversations.encoder(options.base, "internvl")
    prefix = torch.tensor([encode.prefix], device=device)
    model = build(options.base, options.tiny).to(device)
    runner = Runner(model, dtype, cuda and not options.eager, options.rank, options.tower_rank)
    heads = pocket.PatchHeads(runner.width, tuple(n + 1 for n in draw.OBJECT_SIZES)).to(device)
    plain = PlainText(options.text, encode, options.texts, device) if options.text else None
    learned = [*runner.learned(), *(heads.parameters() if options.tower_rank else ())]
    print(f"{sum(p.numel() for p in runner.learned()) / 1e6:.2f} M parameters are learned on {device}", flush=True)
    groups = [stage.group(32 if options.tiny else 1) for stage in STAGES]
    feeds = []  # that of stage 2 waits with full queues
    for number, group in enumerate(groups):
        plan, first_seed = batches.Plan(always=(group,)), options.first_seed + number * SEEDS
        feeds.append(batches.Feed(options.base, "internvl", grid, plan, options.workers, first_seed))
        feeds[-1].max_objects.value = scenes.MAX_OBJECTS if number else 2
    for number, (stage, group, feed) in enumerate(zip(STAGES, groups, feeds)):
        prefetch, shown = pocket.Prefetch(feed, Family, device), pocket.Shown()
        optimiser = torch.optim.AdamW(learned, lr=stage.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        step, spent, begin, last = 0, 0.0, time.time(), time.time()
        while True:
            ((_, tiles, ids, labels, seen),), _ = prefetch.next()
            if step == WARMUP:
                begin = last = time.time()
            if step >= WARMUP:
                spent = (time.time() - begin) / (options.seconds * stage.share)
            spent = max(spent, step / options.steps) if options.steps else spent
            if spent >= 1:
                break
            if step == number == 0:
                check(runner, group, prefix, tiles[:1], ids[:1])
            if number == 0:
                feed.max_objects.value = 2 if spent < 0.08 else 4 if spent < 0.2 else scenes.MAX_OBJECTS
            decay = min(1.0, (step + 1) / 100, (1 - spent) / (1 - stage.hold) + 0.002)
            for part in optimiser.param_groups:
                part["lr"] = stage.lr * options.lr_scale * decay
            ((visual, features),) = runner.see([group], [tiles])
            taught = labels != conversations.IGNORE
            logits = runner.logits(embedded(runner, prefix, visual, ids), taught, runner.decoder.weights)
            figures = {"loss": F.cross_entropy(logits, labels[taught])}
            total = figures["loss"]
            if options.tower_rank:
                figures["characters"], figures["objects"], figures["read"] = heads(features, seen, dtype)
                aid = max(0.1, 1 - 2 * spent) if number == 0 else 0.1
                total = total + aid * (0.5 * figures["characters"] + 0.3 * figures["objects"])
            if plain:
                figures["text_kl"] = plain.loss(runner)
                total = total + options.text_weight * figures["text_kl"]
            optimiser.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimiser.step()
            right, page = logits.argmax(-1) == labels[taught], taught.nonzero()[:, 0]
            for kind, part in zip(("captions", "questions", "documents"), group.slices):
                if part.stop > part.start:
                    figures[kind] = right[(page >= part.start) & (page < part.stop)].float().mean()
            shown.add(**figures)
            step += 1
            if step % options.log_every == 0:
                values, now = "  ".join(f"{k} {v:.4f}" for k, v in shown.take().items()), time.time()
                rate = options.log_every * group.size / (now - last)
                print(f"stage {number + 1}  {now - begin:5.0f} s  step {step:5d}  {values}  {rate:.0f} pages/s", flush=True)
                last = now
        prefetch.close()
        feed.close()
        runner.save(options.out)
        print(f"stage {number + 1}: {step} steps of {group.size} pages; {options.out} is written", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=ROOT / "build/real/smollm2", help="checkpoint; default: that of get.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files of adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the decoder's adapters; 0: frozen; default: 16")
    parser.add_argument("--tower-rank", type=int, default=16, help="of the tower's adapters; 0: frozen; default: 16")
    parser.add_argument("--text", type=Path, help='plain text that the decoder must not forget, JSON Lines of {"text"}')
    parser.add_argument("--texts", type=int, default=16, help="texts a step; default: 16")
    parser.add_argument("--text-weight", type=float, default=1.0, help="of their loss; default: 1")
    parser.add_argument("--seconds", type=float, default=780, help="of both stages; default: 780")
    parser.add_argument("--steps", type=int, help="most steps of a stage; default: no limit")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="factor of the learning rates; default: 1")
    parser.add_argument("--workers", type=int, default=14, help="processes that draw pages; default: 14")
    parser.add_argument("--first-seed", type=int, default=scenes.FIRST_TRAINING_SEED, help="of the pages of stage 1")
    parser.add_argument("--log-every", type=int, default=50, help="steps; default: 50")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="two layers, one of the tower and three pages a step, to try the code")
    options = parser.parse_args()
    if options.first_seed < scenes.FIRST_TRAINING_SEED:
        parser.error(f"--first-seed {options.first_seed} is held out; use {scenes.FIRST_TRAINING_SEED} or more")
    if not (options.base / "model.safetensors").is_file():
        parser.error(f"{options.base} has no model.safetensors; run tools/real/get.sh, or name a folder with --base")
    if options.text and not (options.text.is_file() and options.text.stat().st_size):
        parser.error(f"--text {options.text} is no file with lines; make one with tools/real/sample.py")
    train(options)
    sys.stdout.flush()
    os._exit(0)  # no waiting for threads that still draw


if __name__ == "__main__":
    main()

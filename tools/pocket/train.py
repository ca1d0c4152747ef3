"""Trains a pocket model on drawn pages and clips, and writes its weights; export.py makes a checkpoint of them.

    python3 byte_level.py --family qwen --out FOLDER
    python3 train.py qwen --tokenizer FOLDER --llava pocket-llava --out WEIGHTS --seconds 540

Worker processes draw facts, conversations and page layouts; the GPU paints the pages on a stream of its own while the
last step still runs. While training, linear heads on the vision features are taught what lies under each patch
(characters; the facts of an object), which makes reading emerge within minutes; they are dropped when saving. Matrices
are optimised with Muon (orthogonalised momentum), the rest with AdamW; the learning rate is constant for the first part
of the time given and then falls linearly to nothing. Scenes start with up to two objects, then four, then eight.

`--seconds` counts from the start of the program. Several GPUs train one model when the program is started once for each
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as torchrun does.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse
import os
import queue
import sys
import threading
from pathlib import Path

import torch
import torch.nn.functional as F

import batches
import conversations
import decoder
import draw
import internvl
import llava
import qwen
import scenes
import weights
from optimiser import Crew, Gradients, Muon

FAMILIES = {family.FAMILY: family for family in (llava, internvl, qwen)}


class PatchHeads(torch.nn.Module):
    """Linear readings of the vision features, for the warm-up loss only."""

    def __init__(self, width: int, objects: tuple[int, ...]):
        super().__init__()
        self.sizes = [len(draw.CHARACTERS) + 1] * draw.SLOTS + list(objects)
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, sum(self.sizes))

    def forward(self, features: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype):
        """Losses (characters, objects) and the share of characters read rightly. labels (batch, patches, parts)."""
        h = self.norm(features).to(dtype)
        logits = F.linear(h, self.linear.weight.to(dtype), self.linear.bias.to(dtype)).flatten(0, 1).split(self.sizes, -1)
        labels = labels.flatten(0, 1).long()
        losses, right, present = [], 0, 0
        for k, part in enumerate(logits):
            label = labels[:, k]
            seen = (label > 0).float()
            weight = 0.05 + 0.95 * seen  # most patches show nothing
            loss = F.cross_entropy(part.float(), label, reduction="none")
            losses.append((loss * weight).sum() / weight.sum())
            if k < draw.SLOTS:
                right = right + ((part.argmax(-1) == label) * seen).sum()
                present = present + seen.sum()
        return sum(losses[: draw.SLOTS]), sum(losses[draw.SLOTS :]), right / present.clamp(min=1)


class Prefetch:
    """Takes batches from the feed, sends them to the device and paints them on a side stream, one step ahead."""

    def __init__(self, feed: batches.Feed, family, device: torch.device):
        self.feed, self.family, self.device = feed, family, device
        self.painter = draw.Painter(device)
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            step = 0
            while not self.stopped:
                made = self.feed.next(False)
                others = self.feed.plan.others and step % self.feed.plan.often == 0
                item = self._prepare(made, self.feed.next(True) if others else [])
                step += 1
                while not self.stopped:
                    try:
                        self.ready.put(item, timeout=0.2)
                        break
                    except queue.Full:
                        continue
        except Exception as error:  # handed to the training loop, which raises it
            self.ready.put(error)

    def _prepare(self, *parts):
        if not self.cuda:
            return [[self._paint(g, draw.to_tensors(b, self.device)) for g, b in part] for part in parts], None
        with torch.cuda.stream(self.stream):
            out = [
                [
                    self._paint(
                        g, {k: torch.from_numpy(v).pin_memory().to(self.device, non_blocking=True) for k, v in b.items()}
                    )
                    for g, b in part
                ]
                for part in parts
            ]
            event = torch.cuda.Event()
            event.record()
        return out, event

    @torch.no_grad()
    def _paint(self, group: batches.Group, batch):
        pixels = self.painter.paint(batch, group.height, group.width)
        # Half of the pages stay clean, as the held-out ones are.
        level = (torch.rand(len(pixels) // group.frames, 1, 1, 1, device=self.device) * 12 - 6).clamp_(min=0)
        level = level.repeat_interleave(group.frames, 0)
        pixels = pixels + level * torch.randn_like(pixels)
        seen = self.family.labels(group, batch["characters"], batch["objects"])
        return group, self.family.cut(group, pixels), batch["ids"].long(), batch["labels"].long(), seen

    def next(self):
        item = self.ready.get(timeout=300)
        if isinstance(item, Exception):
            raise item
        parts, event = item
        if event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for part in parts:
                for _, *tensors in part:
                    for t in tensors:
                        t.record_stream(current)
        return parts

    def close(self) -> None:
        self.stopped = True


class Shown:
    """Sums of the figures of the steps since the last line."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, **figures: torch.Tensor) -> None:
        for name, value in figures.items():
            old = self.sums.get(name)
            value = torch.stack([value.detach().float(), torch.ones((), device=value.device)])
            self.sums[name] = value if old is None else old + value

    def take(self) -> dict[str, float]:
        out = {name: (v[0] / v[1]).item() for name, v in self.sums.items()}
        self.sums = {}
        return out


def split_parameters(model, runner) -> tuple[list, list, list]:
    """Matrices inside the vision layers and inside the decoder's (for Muon), and everything else (for AdamW)."""
    vision, text = ([p for part in parts for p in part.parameters() if p.ndim == 2] for parts in runner.matrices())
    taken = {*vision, *text}
    return vision, text, [p for p in model.parameters() if p not in taken]


def text_loss(groups, logits, labels, shown: Shown, other: bool):
    """Sum of the losses of the taught tokens and their number; shows the shares of tokens that come out right."""
    total, count = 0.0, 0
    for group, l, wanted in zip(groups, logits, labels):
        total = total + F.cross_entropy(l.flatten(0, 1), wanted.flatten(), ignore_index=conversations.IGNORE, reduction="sum")
        taught = wanted != conversations.IGNORE
        count = count + taught.sum()
        with torch.no_grad():
            right = (l.argmax(-1) == wanted) & taught
            for kind, part in zip(("captions", "questions", "documents"), group.slices):
                if part.stop > part.start:
                    name = ("other_" if other else "") + ("clip_" if group.frames > 1 else "") + kind
                    shown.add(**{name: right[part].sum() / taught[part].sum().clamp(min=1)})
    return total, count


def train(options: argparse.Namespace) -> None:
    family = FAMILIES[options.family]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    crew = Crew("nccl" if cuda else "gloo")
    torch.manual_seed(crew.rank)
    dtype = torch.bfloat16 if cuda else torch.float32
    plan = family.TINY_PLAN if options.tiny else family.PLAN
    first_seed = options.first_seed + crew.rank * 500_000_000
    feed = batches.Feed(options.tokenizer, options.family, family.grid, plan, options.workers, first_seed)
    encode = conversations.encoder(options.tokenizer, options.family)
    model = family.build(options.tiny)
    if options.start:
        weights.load(model, options.start)
    model.to(device)
    runner = family.Runner(model, dtype, compiled=cuda and not options.eager)
    if options.llava and not options.start:
        decoder.warm(runner.decoder.text, runner.decoder.head, options.tokenizer / "tokenizer.json", options.llava)
    heads = PatchHeads(runner.width, family.LABEL_SIZES).to(device)
    vision, text, others = split_parameters(model, runner)
    others += list(heads.parameters())
    every = [*vision, *text, *others]
    crew.share(every)
    say(crew, f"{sum(p.numel() for p in model.parameters()) / 1e6:.3f} M parameters on {crew.size} x {device}")
    gradients = Gradients(every)

    def optimisers():
        adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        return Muon(vision), Muon(text), adam

    muon_vision, muon_text, adam = optimisers()
    # A decoder that can talk already waits until there is something to be seen.
    patience = 1500 if options.llava and not options.start else 1
    prefix = torch.tensor([encode.prefix], device=device)
    prefetch = Prefetch(feed, family, device)
    feed.max_objects.value = scenes.MAX_OBJECTS if options.start else 2
    shown = Shown()
    warmup = 3 if options.tiny else 20
    end = STARTED + options.seconds
    begin = last_save = last_log = time.time()
    step, spent, scale, kept = 0, 0.0, 1.0, weights.copy(model)
    while True:
        if step % 10 == 0:
            spent = crew.agree((time.time() - begin) / max(end - begin, 1e-3), device) if step > warmup else 0.0
            if spent >= 1:
                break
        if step == warmup:  # compiling is not training
            begin = last_log = time.time()
            shown.take()
            say(crew, f"{begin - STARTED:.0f} s until the first {step} steps were done")
        if not options.start:
            feed.max_objects.value = 2 if spent < 0.04 else 4 if spent < 0.1 else scenes.MAX_OBJECTS
        decay = scale * min(1.0, (step + 1) / 200, (1 - spent) / (1 - options.hold) + 0.002)
        main, other = prefetch.next()
        groups, parts, ids, labels, patches = (list(t) for t in zip(*main))
        seen = runner.see(groups, parts)
        visual, features = zip(*seen)
        characters, objects, read = heads(torch.cat(features), torch.cat(patches), dtype)
        total, count = text_loss(groups, runner.read(groups, visual, prefix, ids), labels, shown, False)
        for group, part, asked, wanted, _ in other:
            ((more, _),) = runner.see([group], [part], eager=True)
            extra, n = text_loss([group], runner.read([group], [more], prefix, [asked], eager=True), [wanted], shown, True)
            total, count = total + extra, count + n
        text_mean = total / count
        aid = max(0.1, 1.0 - 2 * spent)
        loss = text_mean + aid * (0.5 * characters + 0.3 * objects)
        gradients.clear()
        loss.backward()
        gradients.average(crew)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon_vision.step(options.muon_lr * decay)
        muon_text.step(options.muon_lr * decay * min(1.0, 0.1 + step / patience))
        for group in adam.param_groups:
            group["lr"] = options.adam_lr * decay
        adam.step()
        shown.add(loss=text_mean, patches=characters, objects=objects, characters_read=read)
        step += 1
        if step % options.log_every == 0:
            figures, now = shown.take(), time.time()
            rate = options.log_every * plan.size * crew.size / (now - last_log)
            last_log = now
            told = "  ".join(f"{k} {v:.4f}" for k, v in figures.items())
            say(crew, f"{now - STARTED:5.0f} s  step {step:6d}  {told}  {rate:.0f} pages/s  lr x {decay:.3f}")
            if crew.any(not figures["loss"] < 20, device):
                say(crew, "the loss left all bounds: back to the last checkpoint at half the learning rate")
                weights.restore(model, kept)
                (muon_vision, muon_text, adam), scale = optimisers(), scale / 2
            elif crew.agree(float(now - last_save > options.save_every), device):
                kept, last_save = weights.copy(model), now
                if crew.rank == 0:
                    weights.save(model, options.out)
    if crew.rank == 0 and weights.is_finite(model):
        weights.save(model, options.out)
    say(crew, f"done: {step} steps of {plan.size * crew.size} pages in {time.time() - STARTED:.0f} s")
    prefetch.close()
    feed.close()
    if crew.rank == 0 and options.evaluate:
        import trial

        trial.report(family, runner, encode, device, options.evaluate)
    sys.stdout.flush()
    os._exit(0)  # no waiting for threads that still paint or for the other process


def say(crew: Crew, line: str) -> None:
    if crew.rank == 0:
        print(line, flush=True)


@torch.no_grad()
def check(options: argparse.Namespace) -> None:
    """Compares the lean forward pass with the module's own, in float32, on each kind of group."""
    family = FAMILIES[options.family]
    torch.manual_seed(1)
    model = family.build(options.tiny).eval()
    for p in model.parameters():  # default initialisation would hide mistakes
        p.data += torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.1)
    encode = conversations.encoder(options.tokenizer, options.family)
    runner = family.Runner(model, torch.float32, compiled=False)
    prefix, painter = torch.tensor([encode.prefix]), draw.Painter("cpu")
    plan = family.TINY_PLAN
    made = {}
    for group in (*plan.always, *plan.others):
        arrays = batches.make_group(encode, scenes.FIRST_TRAINING_SEED, group, family.grid(group), 8)
        tensors = draw.to_tensors(arrays, "cpu")
        made[group] = family.cut(group, painter.paint(tensors, group.height, group.width)), tensors["ids"].long()
    for groups in (plan.always, *((g,) for g in plan.others)):
        parts, ids = zip(*(made[g] for g in groups))
        visual = [v for v, _ in runner.see(groups, parts)]
        for group, ours in zip(groups, runner.read(groups, visual, prefix, ids)):
            theirs = runner.reference(group, *made[group][:1], prefix, made[group][1])
            error = ((ours - theirs).norm() / theirs.norm()).item()
            print(f"{group}: relative difference of the logits {error:.2e}", flush=True)
            if not error < 1e-4:
                raise SystemExit("pocket: the training forward pass departs from transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer's files")
    parser.add_argument("--out", type=Path, help="folder to write the weights to")
    parser.add_argument("--start", type=Path, help="folder of weights to go on from instead of a fresh model")
    parser.add_argument("--llava", type=Path, help="folder of pocket-llava, whose decoder a fresh model starts with")
    parser.add_argument("--seconds", type=float, default=540, help="time from the start of the program to the last step")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.0015)
    parser.add_argument("--hold", type=float, default=0.5, help="part of the time before the learning rate falls")
    parser.add_argument("--first-seed", type=int, default=scenes.FIRST_TRAINING_SEED)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=110, help="seconds between checkpoints")
    parser.add_argument("--evaluate", type=int, default=0, help="held-out records of each set to answer at the end")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the code on a CPU")
    parser.add_argument("--check", action="store_true", help="compare the forward pass with transformers and stop")
    options = parser.parse_args()
    if options.first_seed < scenes.FIRST_TRAINING_SEED:
        sys.exit(f"pocket: --first-seed {options.first_seed} is held out; use {scenes.FIRST_TRAINING_SEED} or more")
    if options.llava and options.family == "llava":
        sys.exit("pocket: --llava names the decoder that another family starts with; use --start for pocket-llava")
    if options.check:
        check(options)
    elif options.out is None:
        sys.exit("pocket: --out is missing; name the folder to write the weights to")
    else:
        train(options)


if __name__ == "__main__":
    main()

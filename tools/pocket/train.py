"""Trains the pocket LLaVA from nothing on drawn pages, on one GPU, and writes the checkpoint.

    python3 tokenizer.py --out FOLDER && python3 train.py --tokenizer FOLDER --out CHECKPOINT --seconds 1300

Worker processes draw facts, conversations and page layouts; the GPU paints the pages on a stream of its own while the
last step still runs. While training, two linear heads on the vision features are taught what lies under each patch
(characters; the facts of an object), which makes reading emerge within minutes; they are dropped when
saving. Matrices are optimised with Muon (orthogonalised momentum), the rest with AdamW; the learning rate is constant
for the first part of the time given and then falls linearly to nothing. Scenes start with up to two objects, then four,
then eight.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import draw
import examples
import export
import model as pocket
import scenes


class Muon:
    """Momentum orthogonalised by five Newton-Schulz steps, for matrices; equal shapes are done in one batch."""

    STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315

    def __init__(self, parameters: list[torch.nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.02):
        self.momentum, self.weight_decay = momentum, weight_decay
        shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for p in parameters:
            shapes.setdefault(p.shape, []).append(p)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, buffer in zip(self.groups, self.buffers):
            gradient = torch.stack([p.grad for p in group])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonal(gradient.lerp(buffer, self.momentum))
            rows, columns = group[0].shape
            scale = lr * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.float().unbind()), alpha=-scale)

    def orthogonal(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.shape[-2] <= x.shape[-1]
        x = (x if wide else x.mT).bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(self.STEPS):
            a = x @ x.mT
            x = self.A * x + (self.B * a + self.C * a @ a) @ x
        return x if wide else x.mT


class PatchHeads(torch.nn.Module):
    """Linear readings of the vision features, for the warm-up loss only."""

    def __init__(self, width: int):
        super().__init__()
        self.sizes = [len(draw.CHARACTERS) + 1] * draw.SLOTS
        self.sizes += [size + 1 for size in draw.OBJECT_SIZES]
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, sum(self.sizes))

    def forward(self, features: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype):
        """Losses (characters, objects) and the share of characters read rightly. labels (batch, patches, parts)."""
        h = self.norm(features).to(dtype)
        logits = F.linear(h, self.linear.weight.to(dtype), self.linear.bias.to(dtype)).float().split(self.sizes, -1)
        losses, right, present = [], 0, 0
        for k, part in enumerate(logits):
            label = labels[..., k]
            seen = (label > 0).float()
            weight = 0.05 + 0.95 * seen  # most patches show nothing
            loss = F.cross_entropy(part.flatten(0, 1), label.flatten(), reduction="none").view_as(weight)
            losses.append((loss * weight).sum() / weight.sum())
            if k < draw.SLOTS:
                right = right + ((part.argmax(-1) == label) * seen).sum()
                present = present + seen.sum()
        return sum(losses[: draw.SLOTS]), sum(losses[draw.SLOTS :]), right / present


class Prefetch:
    """Takes batches from the feed, sends them to the device and paints them on a side stream, one step ahead."""

    def __init__(self, feed: examples.Feed, device: torch.device, noise: bool = True):
        self.feed, self.device, self.noise = feed, device, noise
        self.painter = draw.Painter(device)
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.mean = torch.tensor(export.CLIP_MEAN, device=device)[:, None, None] * 255
        self.std = torch.tensor(export.CLIP_STD, device=device)[:, None, None] * 255
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stopped:
                item = self._prepare(self.feed.next())
                while not self.stopped:
                    try:
                        self.ready.put(item, timeout=0.2)
                        break
                    except queue.Full:
                        continue
        except Exception as error:  # handed to the training loop, which raises it
            self.ready.put(error)

    def _prepare(self, batch):
        if not self.cuda:
            return self._paint({k: torch.from_numpy(v) for k, v in batch.items()}), None
        with torch.cuda.stream(self.stream):
            tensors = {k: torch.from_numpy(v).pin_memory().to(self.device, non_blocking=True) for k, v in batch.items()}
            out = self._paint(tensors)
            event = torch.cuda.Event()
            event.record()
        return out, event

    @torch.no_grad()
    def _paint(self, batch):
        pixels = self.painter.paint(batch)
        if self.noise:  # half of the pages stay clean, as the held-out ones are
            count = len(pixels)
            level = (torch.rand(count, 1, 1, 1, device=self.device) * 12 - 6).clamp_(min=0)
            pixels = pixels + level * torch.randn_like(pixels)
        labels = torch.cat((batch["characters"], batch["objects"]), -1).long()
        return (pixels - self.mean) / self.std, batch["ids"].long(), batch["labels"].long(), labels

    def next(self):
        item = self.ready.get()
        if isinstance(item, Exception):
            raise item
        tensors, event = item
        if event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for t in tensors:
                t.record_stream(current)
        return tensors

    def close(self) -> None:
        self.stopped = True


def split_parameters(model) -> tuple[list, list]:
    """Matrices inside the layers and the projector (for Muon), and everything else that is trained (for AdamW)."""
    vision = pocket.vision_parts(model)
    unused = set(vision.encoder.layers[-1].parameters()) | set(vision.post_layernorm.parameters())
    inner = [*vision.encoder.layers[:-1], *model.model.language_model.layers, model.model.multi_modal_projector]
    matrices = [p for part in inner for p in part.parameters() if p.ndim == 2]
    taken = set(matrices) | unused
    return matrices, [p for p in model.parameters() if p not in taken]


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mix = examples.Mix(*options.mix)
    feed = examples.Feed(options.tokenizer, mix, options.workers, options.first_seed)
    if options.start:
        model = pocket.LlavaForConditionalGeneration.from_pretrained(options.start, dtype=torch.float32)
        feed.max_objects.value = scenes.MAX_OBJECTS
    else:
        model = pocket.build(options.tiny)
    model.to(device)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}")
    runner = pocket.Runner(model, dtype, compiled=device.type == "cuda")
    heads = PatchHeads(model.config.vision_config.hidden_size).to(device)
    matrices, others = split_parameters(model)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [*others, *heads.parameters()], lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    prefix = torch.tensor([examples.Encoder(options.tokenizer).prefix()], device=device)
    prefetch = Prefetch(feed, device)
    shown = torch.zeros(7, device=device)
    step, start, last_save, last_log = 0, time.time(), time.time(), time.time()
    while True:
        if step == 20:  # compiling is not training
            start = last_log = time.time()
            shown.zero_()
        spent = (time.time() - start) / options.seconds
        if spent >= 1 and step > 20:
            break
        spent = min(spent, 1.0) if step >= 20 else 0.0
        if not options.start:
            feed.max_objects.value = 2 if spent < 0.05 else 4 if spent < 0.12 else scenes.MAX_OBJECTS
        decay = min(1.0, (step + 1) / 200, (1 - spent) / (1 - options.hold) + 0.002)
        pixels, ids, labels, patches = prefetch.next()
        features = runner.see(pixels)
        characters, objects, read = heads(features, patches, dtype)
        logits = runner.logits(runner.read(features, prefix, ids))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=examples.IGNORE, reduction="none")
        losses = losses.view_as(labels)
        taught = labels != examples.IGNORE
        text = losses.sum() / taught.sum()
        aid = max(0.1, 1.0 - 2 * spent)
        loss = text + aid * (0.5 * characters + 0.3 * objects)
        adam.zero_grad(set_to_none=True)
        for p in matrices:
            p.grad = None
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(options.muon_lr * decay)
        for group in adam.param_groups:
            group["lr"] = options.adam_lr * decay
        adam.step()
        with torch.no_grad():
            right = (logits.argmax(-1) == labels) & taught
            shares = [right[k].sum() / taught[k].sum().clamp(min=1) for k in mix.slices]
            shown += torch.stack([text.detach(), characters.detach(), objects.detach(), read, *shares])
        step += 1
        if step % options.log_every == 0:
            t, c, o, r, a, b, d = (shown / options.log_every).tolist()
            shown.zero_()
            now = time.time()
            rate = options.log_every * mix.size / (now - last_log)
            last_log = now
            say(
                f"{now - start:5.0f} s  step {step:6d}  loss {t:.4f}  patches {c:.3f} {o:.3f}  characters read {r:.3f}  "
                f"tokens right: captions {a:.4f} questions {b:.4f} documents {d:.4f}  {rate:.0f} pages/s  lr x {decay:.3f}"
            )
            if not t == t:
                raise SystemExit("pocket: the loss is not a number; lower --muon-lr")
        if time.time() - last_save > options.save_every:
            export.save(model, options.tokenizer, options.out)
            last_save = time.time()
    export.save(model, options.tokenizer, options.out)
    say(f"done: {step} steps of {mix.size} pages in {time.time() - start:.0f} s")
    prefetch.close()
    feed.close()


def say(line: str) -> None:
    print(line, flush=True)


def check(options: argparse.Namespace) -> None:
    """Compares the lean forward pass with the module's own, in float32."""
    torch.manual_seed(1)
    model = pocket.build(options.tiny).eval()
    for p in model.parameters():  # default initialisation would hide mistakes
        p.data += torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.1)
    encode = examples.Encoder(options.tokenizer)
    batch = examples.make_batch(encode, scenes.FIRST_TRAINING_SEED, examples.Mix(1, 1, 1), 8)
    tensors = draw.to_tensors(batch, "cpu")
    mean, std = (torch.tensor(v)[:, None, None] * 255 for v in (export.CLIP_MEAN, export.CLIP_STD))
    pixels = (draw.Painter("cpu").paint(tensors) - mean) / std
    prefix, ids = torch.tensor([encode.prefix()]), tensors["ids"].long()
    runner = pocket.Runner(model, torch.float32, compiled=False)
    with torch.no_grad():
        ours = runner.logits(runner.read(runner.see(pixels), prefix, ids))
        image = torch.full((len(ids), draw.PATCHES**2), model.config.image_token_id)
        full = torch.cat((prefix.expand(len(ids), -1), image, ids), 1)
        theirs = model(input_ids=full, pixel_values=pixels).logits[:, -ids.shape[1] :]
    error = ((ours - theirs).norm() / theirs.norm()).item()
    say(f"relative difference of the logits: {error:.2e}")
    if not error < 1e-4:
        raise SystemExit("pocket: the training forward pass departs from transformers; see model.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json and tokenizer.model")
    parser.add_argument("--out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from instead of a fresh model")
    parser.add_argument("--seconds", type=float, default=1300, help="training time after compiling")
    parser.add_argument(
        "--mix",
        type=int,
        nargs=3,
        default=(32, 48, 48),
        metavar=("CAPTIONS", "QUESTIONS", "DOCUMENTS"),
        help="pages in a batch: scenes with captions, scenes with questions, documents",
    )
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--muon-lr", type=float, default=0.012)
    parser.add_argument("--adam-lr", type=float, default=0.0015)
    parser.add_argument("--hold", type=float, default=0.45, help="part of the time before the learning rate falls")
    parser.add_argument("--first-seed", type=int, default=scenes.FIRST_TRAINING_SEED)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=240, help="seconds between checkpoints")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the code on a CPU")
    parser.add_argument("--check", action="store_true", help="compare the forward pass with transformers and stop")
    options = parser.parse_args()
    if options.first_seed < scenes.FIRST_TRAINING_SEED:
        sys.exit(f"pocket: --first-seed {options.first_seed} is held out; use {scenes.FIRST_TRAINING_SEED} or more")
    if options.check:
        check(options)
    elif options.out is None:
        sys.exit("pocket: --out is missing; name the folder to write the checkpoint to")
    else:
        train(options)


if __name__ == "__main__":
    main()

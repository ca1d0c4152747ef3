"""Muon for matrices, gradients in one buffer, and their average over the processes that train together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


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


class Gradients:
    """The gradients of all parameters as one buffer, which backward adds to."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        first = 0
        for p in parameters:
            p.grad = self.flat[first : first + p.numel()].view_as(p)
            first += p.numel()

    def clear(self) -> None:
        self.flat.zero_()

    def average(self, crew: Crew) -> None:
        if crew.size > 1:
            dist.all_reduce(self.flat)
            self.flat /= crew.size


class Crew:
    """The processes that train one model, one on each device, as the variables of torch.distributed name them."""

    def __init__(self, backend: str):
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.backend = backend
        if self.size > 1:
            from datetime import timedelta

            dist.init_process_group(backend, timeout=timedelta(seconds=120))

    def agree(self, value: float, device: torch.device) -> float:
        """The first process's value, on all of them."""
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        return told.item()

    def any(self, flag: bool, device: torch.device) -> bool:
        if self.size == 1:
            return flag
        told = torch.tensor([float(flag)], device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item() > 0

    def share(self, parameters: list[torch.nn.Parameter]) -> None:
        """Gives all processes the first one's parameters."""
        if self.size > 1:
            for p in parameters:
                dist.broadcast(p.data, 0)

"""Writes which frames transformers' video processors take, for the tests of frame sampling.

Runs the `sample_frames` of the installed transformers 5 itself, taken from its source so that
torch need not be there: the only thing of it that they use is arange(...).int(), which stands here as
torch defines it (computed in double, rounded to float32, truncated).

data/video/sampling.txt has one case a line; "#" begins a comment:
  RULE N FPS NUM_FRAMES WANTED_FPS : NUMBERS    0 is none; NUMBERS is "refused" where it raises
  times N FPS : NUMBERS : TIMES                 Qwen3-VL's timestamps of these frames
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import random
import types
from pathlib import Path

import numpy as np
import transformers
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

DATA = Path(__file__).resolve().parent / "data" / "video"
MODELS = Path(transformers.__file__).parent / "models"


class Steps(np.ndarray):
    """What torch.arange returns, as far as it is used."""

    def int(self) -> np.ndarray:
        """Truncates."""
        return self.astype(np.int32)


def arange(start: float, end: float, step: float = 1) -> Steps:
    """torch.arange: integers stay exact, floats are computed in double and rounded to float32."""
    count = math.ceil((end - start) / step)
    return (np.arange(count) * np.float64(step) + start).astype(np.float32).view(Steps)


def method(file: str, name: str):
    """One method from a source file of transformers, as a function."""
    tree = ast.parse((MODELS / file).read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list = []
    names = {
        "np": np,
        "math": math,
        "torch": types.SimpleNamespace(arange=arange),
        "VideoMetadata": VideoMetadata,
        "logger": types.SimpleNamespace(warning_once=lambda *_: None),
    }
    code = "from __future__ import annotations\n" + ast.unparse(node)
    exec(compile(code, file, "exec"), names)  # the library's own code
    return names[name]


QWEN = types.SimpleNamespace(
    num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=768
)
INTERNVL = types.SimpleNamespace(num_frames=None, fps=None, initial_shift=True)


def get_index(total: int, count: int) -> list[int]:
    """The middles of segments as the original InternVL's demonstration has them."""
    segment = float(total - 1) / count
    return [int(segment / 2 + np.round(segment * i)) for i in range(count)]


def rules() -> dict:
    """By name, a function of metadata, num_frames and fps."""
    qwen2 = method("qwen2_vl/video_processing_qwen2_vl.py", "sample_frames")
    qwen3 = method("qwen3_vl/video_processing_qwen3_vl.py", "sample_frames")
    internvl = method("internvl/video_processing_internvl.py", "sample_frames")
    return {
        "default": lambda m, n, f: default_sample_indices_fn(metadata=m, num_frames=n, fps=f),
        "qwen2_vl": lambda m, n, f: qwen2(QWEN, m, num_frames=n, fps=f),
        "qwen3_vl": lambda m, n, f: qwen3(QWEN, m, num_frames=n, fps=f),
        "internvl": lambda m, n, f: internvl(INTERNVL, m, num_frames=n, fps=f),
        "original": lambda m, n, f: get_index(m.total_num_frames, n),
    }


def numbers(rule, total: int, fps: float, count: int | None, wanted: float | None) -> str:
    """The frames that a rule takes, in words."""
    metadata = VideoMetadata(total_num_frames=total, fps=fps or None)
    try:
        return " ".join(str(int(i)) for i in rule(metadata, count, wanted))
    except ValueError:
        return "refused"


def cases() -> list[str]:
    """Short clips in every way, longer ones at random."""
    generator = random.Random(13)
    lines = []
    for name, rule in rules().items():
        requests = [
            (total, fps, count, None)
            for total in (1, 2, 3, 4, 5, 7, 16, 33)
            for fps in (25.0,)
            for count in (1, 2, 3, 4, 8, 9)
        ]
        requests += [(t, 30000 / 1001, None, f) for t in (4, 9, 50, 301) for f in (0.5, 1, 2, 60)]
        requests += [(t, 0, None, 2) for t in (9, 100)]
        for _ in range(12):
            total = generator.randrange(40, 3000)
            fps = generator.choice((24, 25, 29.97, 30, 12.5))
            requests.append((total, fps, generator.randrange(2, 40), None))
            requests.append((total, fps, None, generator.choice((0.2, 0.3))))
        requests += [(t, 60, n, None) for t in (4194301, 2999999, 1000003) for n in (6, 10, 38)]
        for total, fps, count, wanted in requests:
            if name == "original" and count is None:
                continue
            # torch.arange may give one more, which no video has, and divides by a count of zero.
            try:
                found = numbers(rule, total, fps, count, wanted)
            except ZeroDivisionError:
                continue
            if name in ("qwen2_vl", "internvl") and found.split()[-1:] == [str(total)]:
                found = found.rsplit(" ", 1)[0]
            lines.append(f"{name} {total} {fps!r} {count or 0} {wanted or 0} : {found}")
    stamps = method("qwen3_vl/processing_qwen3_vl.py", "_calculate_timestamps")
    for total, fps, count in ((50, 25.0, 8), (301, 30000 / 1001, 7), (9, 24.0, 1), (999, 12.5, 13)):
        frames = [int(i) for i in np.linspace(0, total - 1, count).round()]
        times = stamps(None, list(frames), fps, 2)
        texts = " ".join(f"<{t:.1f}_seconds>" for t in times)
        lines.append(f"times {total} {fps!r} : {' '.join(map(str, frames))} : {texts}")
    return lines


def main() -> None:
    """Writes sampling.txt into one folder."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--out", type=Path, default=DATA, help="folder (default: data/video/)")
    folder = parser.parse_args().out
    head = "# Made by tests/vision/make_sampling.py, which explains it, with transformers "
    head += transformers.__version__ + "."
    (folder / "sampling.txt").write_text("\n".join([head, *cases()]) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Draws what `vlm-kv fidelity --json` measured: attention error, retained share and bits against quality.

    tools/kv/plot.py FIDELITY.jsonl FOLDER

Writes layer_error.png, retained.png, bits.png and scores.png. Needs matplotlib.
"""

import json
import sys
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("plot.py: matplotlib is not installed; apt install python3-matplotlib, or pip install matplotlib")


def finish(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def layer_error(results: list[dict], folder: Path) -> None:
    """Relative error of the attention output in each layer; below, what visual slots contribute to it."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, key, title in ((axes[0], "error", "whole output"), (axes[1], "visual_error", "part from visual slots")):
        for result in results:
            layers = [entry["layer"] for entry in result["layers"]]
            axis.plot(layers, [entry[key] for entry in result["layers"]], marker="o", ms=3, label=result["spec"])
        axis.set_xlabel("layer")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("relative error of attention output")
    axes[0].legend(fontsize=7)
    finish(figure, folder / "layer_error.png")


def retained(results: list[dict], folder: Path) -> None:
    """Slots that each layer holds, as a share of the tokens fed (PrefixKV, figure 4)."""
    dropping = [r for r in results if len({round(e["slots"], 3) for e in r["layers"]}) > 1] or results
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for result in dropping:
        layers = [entry["layer"] for entry in result["layers"]]
        most = max(entry["slots"] for r in results for entry in r["layers"])
        axis.plot(layers, [entry["slots"] / most for entry in result["layers"]], marker="o", ms=3, label=result["spec"])
    axis.set_xlabel("layer")
    axis.set_ylabel("share of slots held in decode")
    axis.set_ylim(0, 1.05)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    axis.xaxis.get_major_locator().set_params(integer=True)
    finish(figure, folder / "retained.png")


def bits(results: list[dict], folder: Path) -> None:
    """Mean KL against stored bits (full) and nominal bits (hollow)."""
    figure, axis = plt.subplots(figsize=(6.5, 4.5))
    for result in results:
        kl = max(result["kl_mean"], 1e-6)
        (point,) = axis.plot(result["stored_bits"], kl, "o", label=result["spec"])
        axis.plot(result["nominal_bits"], kl, "o", mfc="none", color=point.get_color())
        axis.plot([result["nominal_bits"], result["stored_bits"]], [kl, kl], lw=0.6, color=point.get_color())
    axis.set_yscale("log")
    axis.set_xlabel("bits an element: stored (full), nominal (hollow)")
    axis.set_ylabel("mean KL against f16 (nats)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    finish(figure, folder / "bits.png")


def scores(results: list[dict], folder: Path) -> None:
    """Scores of visual slots: exact, with the policy's keys, and after its remap (CalibQuant, figure 1)."""
    packed = [r for r in results if "visual_scores" in r and r["visual_scores"]["exact"] != r["visual_scores"]["quantized"]]
    if not packed:
        return
    figure, axes = plt.subplots(len(packed), 1, figsize=(7, 2.4 * len(packed)), squeeze=False, sharex=True)
    for axis, result in zip(axes[:, 0], packed):
        histogram = result["visual_scores"]
        edges = [histogram["low"] + histogram["width"] * (i + 0.5) for i in range(len(histogram["exact"]))]
        for key in ("exact", "quantized", "calibrated"):
            if key == "calibrated" and histogram[key] == histogram["quantized"]:
                continue
            total = sum(histogram[key])
            axis.plot(edges, [count / total for count in histogram[key]], label=key)
        axis.set_title(result["spec"], fontsize=9)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[-1, 0].set_xlabel("score of a visual slot before the softmax")
    finish(figure, folder / "scores.png")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    layer_error(results, folder)
    retained(results, folder)
    bits(results, folder)
    scores(results, folder)
    print(f"wrote layer_error.png, retained.png, bits.png and scores.png to {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

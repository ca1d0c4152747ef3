"""matplotlib as the plotting scripts here use it."""

import sys
from pathlib import Path


def import_matplotlib(script: str, folder: str):
    """matplotlib.pyplot; where there is none, one sentence says so with the cure and ends the script."""
    try:
        import matplotlib
        import matplotlib.pyplot

        matplotlib.use("Agg")
        matplotlib.rcParams.update({"font.size": 8, "svg.hashsalt": "kvlm", "axes.grid": True, "grid.alpha": 0.3})
        return matplotlib.pyplot
    except ImportError:
        path = Path(script).resolve()
        sys.exit(f"{path.name}: matplotlib is not installed; apt install python3-matplotlib, or measure without --plot, with "
                 f"--json >FIGURES.jsonl, and draw later: python3 {path} FIGURES.jsonl {folder}")


def save(plt, figure, folder: Path, name: str) -> None:
    """As NAME.png and NAME.svg, the same bytes for the same figures."""
    for kind in ("png", "svg"):
        figure.savefig(folder / f"{name}.{kind}", dpi=120, bbox_inches="tight",
                       metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)

"""What the plotting scripts here share: matplotlib, where figures are written and how they look."""

import argparse
import sys
from pathlib import Path

KINDS = ("png", "svg", "pdf")
PAPER_WIDTH, PAPER_HEIGHT, PAPER_POINTS = 3.35, 8.5, 8  # a column and a page in inches; the size of all letters


def shown(text) -> str:
    """A name for a message: what a terminal would obey becomes an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(text))


def read_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="?", metavar="FIGURES.jsonl", help="what --json printed")
    parser.add_argument("target", metavar="FOLDER|FILE", help="a folder: NAME.png and NAME.svg in it; FILE.pdf, .svg or .png: "
                        "FILE-NAME of this kind")
    parser.add_argument("--style", choices=("screen", "paper"), default="screen",
                        help=f"paper: one column of {PAPER_WIDTH} inches, letters of {PAPER_POINTS} pt, no title")
    parser.add_argument("--check", action="store_true", help="only say whether it could draw")
    arguments = parser.parse_args()
    if arguments.figures is None and not arguments.check:
        parser.error("give FIGURES.jsonl and a folder or file")
    return arguments


def import_matplotlib(script: str, target: str):
    """matplotlib.pyplot; where there is none, one sentence says so with the cure and ends the script."""
    try:
        import matplotlib
        import matplotlib.pyplot

        matplotlib.use("Agg")
        matplotlib.rcParams.update({"font.size": 8, "svg.hashsalt": "kvlm", "axes.grid": True, "grid.alpha": 0.3,
                                    "pdf.fonttype": 42})
        return matplotlib.pyplot
    except ImportError:
        path = Path(script).resolve()
        sys.exit(f"{path.name}: matplotlib is not installed; apt install python3-matplotlib, or start it with build/eval-venv/bin "
                 f"(of tools/eval/setup.sh) first in PATH, or measure without --plot, with --json >FIGURES.jsonl, and draw "
                 f"later: python3 {path} FIGURES.jsonl {shown(target)}")


class Output:
    """Where figures go, and how large they and their letters are."""

    def __init__(self, target: str, style: str = "screen"):
        path = Path(target)
        kind = path.suffix[1:].lower()
        one_kind = kind in KINDS and not path.is_dir()
        self.folder = path.parent if one_kind else path
        self.prefix = f"{path.stem}-" if one_kind else ""
        self.kinds = (kind,) if one_kind else ("png", "svg")
        self.paper = style == "paper"
        self.written: list[str] = []
        self.folder.mkdir(parents=True, exist_ok=True)

    def size(self, width: float, height: float) -> tuple[float, float]:
        """Of a figure, in inches; on paper as wide as a column."""
        return (PAPER_WIDTH, min(max(2.4, height), PAPER_HEIGHT)) if self.paper else (width, height)

    def points(self, points: float) -> float:
        """The size of letters that have this size on a screen."""
        return PAPER_POINTS if self.paper else points

    def title(self, figure, text: str) -> None:
        if not self.paper:
            figure.suptitle(text, fontsize=9)

    def name_length(self, most: int) -> int:
        """Letters of a spec in a legend."""
        return min(most, 38) if self.paper else most

    def legend(self, axis, *, fontsize: float, **options) -> None:
        """Beside the axes; on paper at the foot of the figure, which becomes higher by it."""
        fontsize = self.points(fontsize)
        if not self.paper:
            axis.legend(fontsize=fontsize, title_fontsize=fontsize, frameon=False, **options)
            return
        figure = axis.figure
        options |= {"loc": "lower left", "bbox_to_anchor": (0, 0), "bbox_transform": figure.transFigure, "ncol": 1}
        legend = axis.legend(fontsize=fontsize, title_fontsize=fontsize, frameon=False, borderaxespad=0.2, **options)
        legend.set_in_layout(False)
        lines = sum(text.get_text().count("\n") + 1 for text in legend.get_texts()) + bool(options.get("title"))
        foot = 1.5 * PAPER_POINTS / 72 * lines + 0.1
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + foot)
        figure.set_layout_engine("constrained", rect=(0, foot / (height + foot), 1, height / (height + foot)))

    def save(self, plt, figure, name: str) -> None:
        """The same bytes for the same figures."""
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        for kind in self.kinds:
            figure.savefig(self.folder / f"{self.prefix}{name}.{kind}", dpi=300 if self.paper else 120,
                           bbox_inches=None if self.paper else "tight", metadata=dates.get(kind))
        plt.close(figure)
        self.written.append(self.prefix + name)

    def report(self) -> None:
        kinds = " and ".join("." + kind for kind in self.kinds)
        print(f"wrote {', '.join(map(shown, self.written))} ({kinds}) to {shown(self.folder)}", file=sys.stderr)

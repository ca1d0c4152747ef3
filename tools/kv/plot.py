#!/usr/bin/env python3
"""Draws what `vlm-kv fidelity --json` measured.

    tools/kv/plot.py FIGURES.jsonl FOLDER                     draws NAME.png and NAME.svg
    tools/kv/plot.py FIGURES.jsonl out/a.pdf --style paper    draws out/a-NAME.pdf, one column wide; .svg and .png likewise
    tools/kv/plot.py --check FOLDER                           says whether it could, before anything is measured

Writes layer_error (error of the attention output by layer), softmax_error (of its weights), retained (share of the tokens that each layer holds), bits (KL
against bits) and scores (scores of visual slots); what does not fit on a page goes on
in NAME-2 and so on. A spec has one colour and number in all of them. Needs matplotlib.
"""

import sys
from pathlib import Path

from pictures import Output, import_matplotlib, read_arguments
from plot_data import (KL_FLOOR, curve, equal_curves, error_bar, floored, group_label, label_places, origin, panels,
                       pareto, read_results, score_shares, shortened, with_changed_scores)

ROWS_A_PAGE = 4
SCORES_A_PAGE = 12
LEGEND_ROWS = 34


class Plotter:
    """Pictures of one file of results."""

    def __init__(self, plt, results: list[dict], out: Output):
        self.plt, self.results, self.out = plt, results, out
        self.number = {result["spec"]: i + 1 for i, result in enumerate(results)}
        hues = plt.get_cmap("tab10").colors
        self.color = {spec: hues[(i - 1) % 10] for spec, i in self.number.items()}
        # A hue comes again with another line and marker.
        self.style = {spec: ("-", "--", ":", "-.")[(i - 1) // 10 % 4] for spec, i in self.number.items()}
        self.marker = {spec: "osD^<>P"[(i - 1) // 10 % 7] for spec, i in self.number.items()}

    def label(self, group: list[dict]) -> str:
        return f"{self.number[group[0]['spec']]}  {group_label(group, self.out.name_length(64))}"

    def line(self, axis, group: list[dict], key: str) -> None:
        spec = group[0]["spec"]
        layers = [entry["layer"] for entry in group[0]["layers"]]
        axis.plot(layers, curve(group[0], key), color=self.color[spec], ls=self.style[spec], marker=self.marker[spec], ms=3,
                  lw=1, label=self.label(group))

    def finish(self, figure, name: str, page: int, pages: int, title: str) -> None:
        name = name if page == 0 else f"{name}-{page + 1}"
        if pages > 1:
            title += f" (page {page + 1} of {pages})"
        self.out.title(figure, f"{title}\n{origin(self.results)}")
        self.out.save(self.plt, figure, name)

    def rows_of_panels(self, name: str, title: str, groups: list[list[dict]], columns: list[tuple[str, str]], ylabel: str,
                       top: float | None = None) -> None:
        """A row of panels, one a column, for every few curves, with their names beside; on paper a figure a column."""
        if self.out.paper and len(columns) > 1:
            for key, heading in columns:
                self.rows_of_panels(name if key == columns[0][0] else key, title, groups, [(key, "")], f"{ylabel}, {heading}", top)
            return
        rows = panels(groups)
        pages = panels(rows, 1 if self.out.paper else ROWS_A_PAGE)
        highest = max(max(curve(group[0], key), default=0) for group in groups for key, _ in columns)
        for page, shown in enumerate(pages):
            figure, axes = self.plt.subplots(len(shown), len(columns), figsize=self.out.size(4 * len(columns) + 4.5, 2.6 * len(shown) + 0.6),
                                             squeeze=False, sharex=True, sharey=True, layout="constrained")
            for row, some in zip(axes, shown):
                for axis, (key, heading) in zip(row, columns):
                    for group in some:
                        self.line(axis, group, key)
                    if axis in axes[0]:
                        axis.set_title(heading, fontsize=8)
                    axis.set_ylim(0, top or 1.05 * highest or 1)
                    axis.xaxis.get_major_locator().set_params(integer=True)
                row[0].set_ylabel(ylabel)
                self.out.legend(row[-1], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7)
            for axis in axes[-1]:
                axis.set_xlabel("layer")
            self.finish(figure, name, page, len(pages), title)

    def layer_error(self) -> None:
        groups = equal_curves(self.results, "error", "visual_error")
        self.rows_of_panels("layer_error", "Error of the attention output by layer; equal curves are one line", groups,
                            [("error", "whole output"), ("visual_error", "part from visual slots")], "relative error")

    def softmax_error(self) -> None:
        """As CalibQuant's figure 2, of the policies that drop nothing."""
        whole = [r for r in self.results if all(layer.get("softmax_mse") is not None for layer in r["layers"])]
        if whole:
            self.rows_of_panels("softmax_error", "Error of the softmax by layer; equal curves are one line",
                                equal_curves(whole, "softmax_mse"), [("softmax_mse", "")], "mean squared error")

    def retained(self) -> None:
        """As PrefixKV's figure 4."""
        self.rows_of_panels("retained", "Tokens that a layer holds in decode; equal curves are one line",
                            equal_curves(self.results, "share"), [("share", "")], "share of the tokens fed", top=1.05)

    def bits(self) -> None:
        columns = -(-len(self.results) // LEGEND_ROWS)
        figure, axis = self.plt.subplots(figsize=self.out.size(7 + 3.5 * columns, 2.4 if self.out.paper else 5.5), layout="constrained")
        front = pareto(self.results)
        chosen = {result["spec"] for result in front}
        axis.step([r["stored_bits"] for r in front], [floored(r["kl_mean"])[0] for r in front], where="post", color="0.6",
                  lw=1, zorder=0, label="no other has both fewer bits and less KL")
        for result in self.results:
            spec = result["spec"]
            kl, below = floored(result["kl_mean"])
            color = self.color[spec]
            axis.errorbar(result["stored_bits"], kl, yerr=[[reach] for reach in error_bar(result)], color=color, elinewidth=0.7,
                          marker="v" if below else self.marker[spec], ms=5, ls="",
                          label=f"{self.number[spec]}  {shortened(spec, self.out.name_length(64))}{' *' if spec in chosen else ''}")
            axis.plot([result["nominal_bits"], result["stored_bits"]], [kl, kl], lw=0.5, color=color)
            axis.plot(result["nominal_bits"], kl, marker="|", ms=4, color=color)
        axis.set_yscale("log")
        axis.set_ylim(bottom=KL_FLOOR / 2)
        axis.axhline(KL_FLOOR, color="0.6", lw=0.6, ls=":")
        axis.annotate(f"triangles: below {KL_FLOOR:g}", (0.01, KL_FLOOR), xycoords=("axes fraction", "data"),
                      xytext=(0, 2 if self.out.paper else -8),
                      textcoords="offset points", fontsize=self.out.points(6), color="0.4")
        axis.set_xlabel("bits an element (tick: nominal)" if self.out.paper else "bits an element: stored (marker), nominal (tick)")
        axis.set_ylabel("mean KL (nats)" if self.out.paper else "mean KL against f16 (nats), 1.96 standard errors over tokens")
        self.out.legend(axis, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=6.5, ncol=columns,
                        title="* on the grey line")
        self.numbers(axis)
        self.finish(figure, "bits", 0, 1, "Divergence against memory")

    def numbers(self, axis) -> None:
        """The number of each marker, with a line to it where there is no room next to it."""
        axis.figure.draw_without_rendering()  # the layout decides what is near
        size = self.out.points(6)
        dots = 72 / axis.figure.dpi

        def point(bits: float, result: dict) -> tuple[float, float]:
            return tuple(dots * (axis.transData.transform((bits, floored(result["kl_mean"])[0])) - axis.bbox.min))

        points = [point(result["stored_bits"], result) for result in self.results]
        lines = [point(result["nominal_bits"], result) for result in self.results]
        taken = [((x + left) / 2, y, abs(x - left) + 8, 8) for (x, y), (left, _) in zip(points, lines)]
        names = [str(self.number[result["spec"]]) for result in self.results]
        places = label_places(points, [(0.66 * size * len(name), size) for name in names], tuple(dots * axis.bbox.size), taken)
        for result, name, (x, y), place in zip(self.results, names, points, places):
            color = self.color[result["spec"]]
            line = {"arrowstyle": "-", "lw": 0.4, "color": color, "shrinkA": 0, "shrinkB": 0}
            axis.annotate(name, (result["stored_bits"], floored(result["kl_mean"])[0]), xytext=(place[0] - x, place[1] - y),
                          textcoords="offset points", ha="center", va="center", fontsize=size, color=color, arrowprops=line)

    def scores(self) -> None:
        """As CalibQuant's figure 1."""
        pages = panels(with_changed_scores(self.results), 3 if self.out.paper else SCORES_A_PAGE)
        for page, shown in enumerate(pages):
            columns = 1 if self.out.paper else min(3, len(shown))
            rows = -(-len(shown) // columns)
            figure, axes = self.plt.subplots(rows, columns, figsize=self.out.size(4 * columns, 2.3 * rows + 0.8), squeeze=False, sharex=True,
                                             sharey=True, layout="constrained")
            for axis in axes.flat[len(shown):]:
                axis.set_visible(False)
            for axis, result in zip(axes.flat, shown):
                self.score_panel(axis, result)
            for row in axes:
                row[0].set_ylabel("share of scores")
            for column in axes.T:
                bottom = [axis for axis in column if axis.get_visible()][-1]
                bottom.set_xlabel("score before the softmax")
                bottom.tick_params(labelbottom=True)
            self.finish(figure, "scores", page, len(pages), "Scores of the visual slots that are held")

    def score_panel(self, axis, result: dict) -> None:
        histogram = result["visual_scores"]
        spec = result["spec"]
        curves = [("exact", "exact, of all slots", "black", "-"), ("quantized", "as held", self.color[spec], "-")]
        if histogram["calibrated"] != histogram["quantized"]:
            curves.append(("calibrated", "as held, remapped", self.color[spec], "--"))
        for key, label, color, style in curves:
            scores, shares, beyond = score_shares(histogram, key)
            if beyond > 0:
                label += f" ({100 * beyond:.2g} % beyond)"
            axis.plot(scores, [share or float("nan") for share in shares], color=color, ls=style, lw=1, label=label)
        axis.set_title(f"{self.number[spec]}  {shortened(spec, self.out.name_length(52))}", fontsize=self.out.points(7))
        axis.set_yscale("log")
        axis.legend(fontsize=self.out.points(6), frameon=False)


def main() -> int:
    arguments = read_arguments(__doc__)
    plt = import_matplotlib(__file__, arguments.target)
    if arguments.check:
        return 0
    results = read_results(Path(arguments.figures))
    out = Output(arguments.target, arguments.style)
    plotter = Plotter(plt, results, out)
    if all(result["layers"] for result in results):
        plotter.layer_error()
        plotter.softmax_error()
        plotter.retained()
        plotter.scores()
    plotter.bits()
    out.report()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        sys.exit(f"plot.py: {sys.argv[1]!r} is not what `vlm-kv fidelity --json` prints ({type(error).__name__}: {error})")

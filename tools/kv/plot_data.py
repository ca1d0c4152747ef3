"""What plot.py draws, made ready: nothing here needs matplotlib."""

import itertools
import json
import math
from pathlib import Path

KL_FLOOR = 1e-6  # nats; below it lies what rounding in the softmax makes
PANEL_CURVES = 8  # that one panel can show and its legend can name
NAMES_SHOWN = 3  # of specs whose curves are one


def read_results(path: Path) -> list[dict]:
    """The objects of `vlm-kv fidelity --json`, one a line; later lines of a spec replace earlier ones."""
    results = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            results[result["spec"]] = result
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SystemExit(f"plot.py: {path} line {number} is not what `vlm-kv fidelity --json` prints ({error})")
    if not results:
        raise SystemExit(f"plot.py: {path} holds no results; make it with `vlm-kv fidelity --json`")
    return list(results.values())


def origin(results: list[dict]) -> str:
    """Model, data, records and tokens, for every picture."""

    def values(key: str) -> str:
        found = list(dict.fromkeys(str(result.get(key, "?")) for result in results))
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if len(found) == 2 else "several"

    model = Path(values("model")).name or values("model")
    data = Path(values("data")).name
    return f"model {model}, data {data}: {values('records')} records, {values('tokens')} teacher-forced tokens a spec"


def curve(result: dict, key: str) -> tuple[float, ...]:
    """A figure of each layer."""
    return tuple(entry[key] for entry in result["layers"])


def equal_curves(results: list[dict], *keys: str) -> list[list[dict]]:
    """Results whose curves of all `keys` are the same to four digits, together; in the file's order."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        if result["layers"]:
            shape = tuple(float(f"{value:.4g}") for key in keys for value in curve(result, key))
            groups.setdefault(shape, []).append(result)
    return list(groups.values())


def group_label(group: list[dict], most: int = 64) -> str:
    """"a", "a = b", "a = b = c and 5 more", a name a line."""
    names = [shortened(result["spec"], most) for result in group]
    label = "\n= ".join(names[:NAMES_SHOWN])
    return label if len(names) <= NAMES_SHOWN else f"{label}\nand {len(names) - NAMES_SHOWN} more"


def panels(items: list, size: int = PANEL_CURVES) -> list[list]:
    """As even as possible, of at most `size`."""
    if not items:
        return []
    count = math.ceil(len(items) / size)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


def floored(kl: float) -> tuple[float, bool]:
    """A KL as it is drawn, and whether it lies below the axis."""
    return max(kl, KL_FLOOR), kl < KL_FLOOR


def error_bar(result: dict) -> tuple[float, float]:
    """How far 1.96 standard errors of the mean KL reach down and up, within the axis."""
    kl, below = floored(result["kl_mean"])
    reach = 1.96 * result.get("kl_std_error", 0)
    return (0.0, 0.0) if below else (min(reach, kl - KL_FLOOR), reach)


Box = tuple[float, float, float, float]  # centre, width and height


def label_places(points: list[tuple[float, float]], sizes: list[tuple[float, float]], high: tuple[float, float],
                 taken: list[Box]) -> list[tuple[float, float]]:
    """Centres of labels of these widths and heights: each as near to its point as it covers nothing that is taken and no
    earlier label, between (0, 0) and `high`; farther where its line to the point would cross earlier labels."""

    def covered(x: float, y: float, width: float, height: float, others: list[Box]) -> list[Box]:
        return [box for box in others if 2 * abs(x - box[0]) < width + box[2] and 2 * abs(y - box[1]) < height + box[3]]

    labels: list[Box] = []
    for (x, y), (width, height) in zip(points, sizes):
        cost, best = math.inf, (x, y)
        for reach, turn in itertools.product(range(6, 200, 3), range(16)):
            if reach >= cost:
                break
            angle = (1 + turn) * math.pi / 8
            at = (x + (reach + width / 2) * math.cos(angle), y + (reach + height / 2) * math.sin(angle))
            inside = width / 2 <= at[0] <= high[0] - width / 2 and height / 2 <= at[1] <= high[1] - height / 2
            if inside and not covered(*at, width, height, taken + labels):
                crossed = {box for n in range(1, 16) for box in covered(x + n / 16 * (at[0] - x), y + n / 16 * (at[1] - y), 0, 0, labels)}
                if reach + 15 * len(crossed) < cost:
                    cost, best = reach + 15 * len(crossed), at
        labels.append((*best, width, height))
    return [(x, y) for x, y, _, _ in labels]


def pareto(results: list[dict]) -> list[dict]:
    """Those that no other result beats in stored bits and KL at once, fewest bits first. Values below the
    floor are equal."""
    front = []
    for result in sorted(results, key=lambda r: (r["stored_bits"], floored(r["kl_mean"])[0])):
        if not front or floored(result["kl_mean"])[0] < floored(front[-1]["kl_mean"])[0]:
            front.append(result)
    return front


def score_shares(histogram: dict, key: str) -> tuple[list[float], list[float], float]:
    """Scores (the middle of a bin) and their shares without the outer bins, which hold all that lies beyond; and
    the share of those."""
    counts = histogram[key]
    total = max(sum(counts), 1)
    middles = [histogram["low"] + histogram["width"] * (i + 0.5) for i in range(len(counts))]
    return middles[1:-1], [count / total for count in counts[1:-1]], (counts[0] + counts[-1]) / total


def with_changed_scores(results: list[dict]) -> list[dict]:
    return [r for r in results if "visual_scores" in r and r["visual_scores"]["exact"] != r["visual_scores"]["quantized"]]


def shortened(text: str, most: int = 46) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."

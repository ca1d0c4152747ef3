"""Prompts of plain English: passages of the licences that every Debian has, each with the text that follows it.

    python3 prompts.py >prompts.jsonl

Lines for `vlm-kv fidelity --data`, 200 of them: a prompt of some 480 tokens and a text of some 70. Prompts overlap, texts do not.
Standard library only; the same lines for the same files.
"""

import argparse
import json
import sys
from pathlib import Path

FOLDER = Path("/usr/share/common-licenses")
NAMES = ("GPL-3", "GFDL-1.3", "LGPL-2.1", "MPL-1.1", "GPL-2", "MPL-2.0", "GPL-1", "Apache-2.0", "GFDL-1.2", "LGPL-2", "CC0-1.0", "LGPL-3", "Artistic")
PROMPT, TEXT, STEP = 2000, 300, 1000  # letters


def records(folder: Path, count: int):
    """Passages in turn of all files, so that the first ones are of many."""
    texts = {name: " ".join((folder / name).read_text(encoding="utf-8").split()) for name in NAMES}
    number = 0
    for start in range(0, max(map(len, texts.values())), STEP):
        for name, text in texts.items():
            if start + PROMPT + TEXT > len(text):
                continue
            begin = text.index(" ", start) + 1 if start else 0
            middle = text.index(" ", begin + PROMPT) + 1
            end = text.find(" ", middle + TEXT)
            yield {"id": f"{name}-{start}", "prompt": "Continue this text.\n\n" + text[begin:middle].strip(), "text": text[middle : end if end > 0 else None]}
            number += 1
            if number == count:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"folder of the licences; default: {FOLDER}")
    parser.add_argument("--count", type=int, default=200, help="prompts; default: 200")
    options = parser.parse_args()
    missing = [name for name in NAMES if not (options.folder / name).is_file()]
    if missing:
        print(f"prompts.py: {options.folder} has no {missing[0]}; name another folder with --folder", file=sys.stderr)
        return 1
    for record in records(options.folder, options.count):
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())

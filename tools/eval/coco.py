#!/usr/bin/env python3
"""Captions of COCO, or of any set in its format: BLEU-1..4, METEOR, ROUGE_L and CIDEr against bits, for models and specs.

    python3 tools/eval/coco.py --out OUT --annotations annotations/captions_val2014.json --model MODEL --kv f16 --kv kivi
    python3 tools/eval/coco.py --out OUT --annotations FILE --results captions_val2014_NAME_results.json

Asks `vlm-run --batch` once a spec, writes captions_<split>_<name>_results.json and scores with pycocoevalcap
(tools/eval/setup.sh). Without --annotations: our own held-out scenes, with `exact` and facts as well.
"""

import sys
from pathlib import Path

import arguments
import files
import pipeline
from errors import run_main
from table import show


def main() -> int:
    parser = arguments.parser(__doc__, "captions_heldout.json", "COCO's captions_<split>.json")
    parser.add_argument("--spice", action="store_true", help="SPICE too, which downloads its models on its first run")
    parser.add_argument("--instances", type=Path, help="COCO's instances_<split>.json: objects per image, for the report")
    options = parser.parse_args()
    task = pipeline.Task(files.read_captions, lambda split, name: f"captions_{split.name}_{name}_results.json",
                         files.caption_results, files.read_caption_results)  # fmt: skip
    split = files.read_captions(options.annotations, options.images)
    if options.instances:
        split = files.with_objects(split, options.instances)
    show(pipeline.evaluate(task, split, options), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("coco.py", main))

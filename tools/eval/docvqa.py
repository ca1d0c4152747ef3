#!/usr/bin/env python3
"""Questions on documents of DocVQA, or of any set in its format: ANLS against bits, for models and specs.

    python3 tools/eval/docvqa.py --out OUT --annotations val_v1.0.json --model MODEL --kv f16 --kv kivi
    python3 tools/eval/docvqa.py --out OUT --annotations FILE --results submission.json

Asks `vlm-run --batch` once a spec and writes the submission as DocVQA takes it, docvqa_<split>_<name>.json; of a test
split, which has no answers, that is all. Without --annotations: our own held-out documents, with `answers` besides.
"""

import sys

import arguments
import files
import pipeline
from errors import run_main
from table import show


def main() -> int:
    options = arguments.parser(__doc__, "documents_heldout.json", "DocVQA's val_v1.0.json").parse_args()
    task = pipeline.Task(files.read_documents, lambda split, name: f"docvqa_{split.name}_{name}.json",
                         files.answer_results, files.read_answer_results)  # fmt: skip
    split = files.read_documents(options.annotations, options.images)
    show(pipeline.evaluate(task, split, options), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("docvqa.py", main))

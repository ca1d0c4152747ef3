#!/usr/bin/env python3
"""Questions of ChartQA, TextVQA and VizWiz: relaxed or VQA accuracy against bits, for models and specs.

    python3 tools/eval/vqa.py --task chartqa --out OUT --annotations test-00000-of-00001.parquet --model MODEL --kv f16 --kv kivi
    python3 tools/eval/vqa.py --task textvqa --out OUT --annotations TextVQA_0.5.1_val.json --results submission.json

Takes the files as lmms-lab, VLMEvalKit and the data sets' authors publish them. Asks `vlm-run --batch` once a spec, scores as
the protocol's harness does and writes TASK_<split>_<name>.json. Without --annotations: our own held-out questions in the
task's form.
"""

import functools
import sys

import arguments
import files
import made_sets
import pipeline
from errors import run_main
from table import show

TASKS = (files.CHARTQA, files.TEXTVQA, files.VIZWIZ)


def main() -> int:
    parser = arguments.parser(__doc__, None, "a file of the task in a published format")
    parser.add_argument("--task", required=True, choices=TASKS)
    options = parser.parse_args()
    if options.annotations is None:
        options.annotations, made_for = made_sets.made_set(options.task, options.out / "made")
        options.images = options.images or made_for
    read = functools.partial(files.read_questions, task=options.task)
    task = pipeline.Task(read, lambda split, name: f"{split.task}_{split.name}_{name}.json", files.answer_results,
                         files.read_answer_results)  # fmt: skip
    show(pipeline.evaluate(task, read(options.annotations, options.images), options), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("vqa.py", main))

#!/usr/bin/env python3
"""Questions on videos of Video-MME and MVBench: accuracy against bits, by duration, domain and task, for models and specs.

    python3 tools/eval/video.py --out OUT --annotations videomme/test-00000-of-00001.parquet --model MODEL --kv f16 --kv kivi
    python3 tools/eval/video.py --out OUT --annotations MVBench/json --videos MVBench/video --model MODEL --frames 16

Asks `vlm-run --batch` once a spec. Letters are read from the answers as the protocol's harness does it; standard errors
are clustered by video. Without --annotations: our own held-out videos, with their facts as scores. Subtitles are not shown.
"""

import functools
import sys
from dataclasses import replace

import arguments
import video_protocols
from breakdown import group_scores, group_table
from errors import run_main
from pipeline import Task, evaluate
from storage import write_json
from table import show
from video_files import read_video_results, read_videos, results_name, video_results


def main() -> int:
    parser = arguments.parser(
        __doc__, "clips_heldout.json", "Video-MME's .parquet, .tsv or .json; MVBench's .json, .tsv or folder of .json",
        names=video_protocols.NAMES, pictures=("videos",), model="pocket-qwen",
    )  # fmt: skip
    arguments.add_frames(parser)
    options = parser.parse_args()
    split = read_videos(options.annotations, options.images)
    options.protocol = options.protocol or video_protocols.default_name(split)
    flags, told = video_protocols.frames_of(options.protocol, options.frames, options.fps)
    split = replace(split, name=split.name + told)
    task = Task(read_videos, results_name, video_results, read_video_results,
                protocol=functools.partial(video_protocols.find_protocol, flags=flags))  # fmt: skip
    results = evaluate(task, split, options)
    if results:
        groups = group_scores(results, split)
        write_json(options.out / "groups.json", [score.to_json() for score in groups])
        show(results, options.out)
        print("\n" + group_table(groups), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_main("video.py", main))

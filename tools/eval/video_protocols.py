"""How the harnesses ask about a video: prompts, limits, frames and the rule that reads a letter. See protocols.py.

lmms-eval at 75571cf, VLMEvalKit at e8e78f0. Frames are chosen by the model's own processor, as `vlm-run` does it, where
VLMEvalKit cuts them out itself; subtitles are never shown, though lmms-eval's prompt speaks of them.
"""

from __future__ import annotations

import choices
from errors import EvaluationError
from records import Split
from protocols import QWEN_PIXELS, VLMEVALKIT_TOKENS, Protocol
from video_files import CLIPS, MVBENCH, VIDEO_MME

NAMES = ("native", "lmms-eval", "vlmevalkit")
OF_TASK = {VIDEO_MME: ("lmms-eval", "vlmevalkit"), MVBENCH: ("lmms-eval",), CLIPS: ("native",)}
FRAMES = {"lmms-eval": 32, "vlmevalkit": 8}  # VLMEvalKit's: the first of those in its data sets' names

ONLY_THE_LETTER = "Respond with only the letter (A, B, C, or D) of the correct option."


def default_name(split: Split) -> str:
    return OF_TASK[split.task][0]


def frames_of(name: str, frames: int | None, fps: float | None) -> tuple[tuple[str, ...], str]:
    """Flags of vlm-run for what is asked for, else for the harness's own number; and how a split's name tells them."""
    if fps is not None:
        return ("--fps", f"{fps:g}"), f"-{fps:g}fps"
    count = frames or FRAMES.get(name)
    return (("--frames", str(count)), f"-{count}frames") if count else ((), "")


def find_protocol(name: str, split: Split, family: str, flags: tuple[str, ...]) -> Protocol:
    """EvaluationError where the harness has no such task, or asks in a way that vlm-run cannot."""
    if name not in OF_TASK[split.task]:
        why = ""
        if (name, split.task) == ("vlmevalkit", MVBENCH):
            why = " (VLMEvalKit begins the model's answer for it, which vlm-run does not)"
        raise EvaluationError(
            f"--protocol {name} has no way with {split.task}{why}; there is {' and '.join(OF_TASK[split.task])}"
        )
    if split.task == CLIPS:
        return Protocol(name, "{question}", None, flags, ("right", "facts"))
    if name == "vlmevalkit":
        prompt = (
            "\nThese are the frames of a video. Select the best answer to the following multiple-choice question based on "
            f"the video. {ONLY_THE_LETTER}\nQuestion: {{question}}\n{{choices}}\nAnswer: "
        )
        return Protocol(name, prompt, VLMEVALKIT_TOKENS.get(family, 2048), flags, ("accuracy",),
                        "frames are those of the model's own processor, not the harness's; an answer without a letter is "
                        "wrong, where the harness asks a judge", letter=choices.video_mme_vlmevalkit)  # fmt: skip
    pixels = QWEN_PIXELS if family.startswith("qwen") else ()
    if split.task == MVBENCH:
        prompt = "Question:{question}\nOption:\n{choices}\nOnly give the best option.\n"
        return Protocol(name, prompt, 16, (*pixels, *flags), ("accuracy",),
                        "an empty answer is wrong, where the harness leaves it out of the mean",
                        letter=choices.mvbench_lmms_eval)  # fmt: skip
    prompt = (
        "Select the best answer to the following multiple-choice question based on the video and the subtitles. "
        f"{ONLY_THE_LETTER}\n{{question}}\n{{choices}}\n\nAnswer with the option's letter from the given choices directly."
    )
    return Protocol(name, prompt, 16, (*pixels, *flags), ("accuracy",), letter=choices.video_mme_lmms_eval)

"""Shapes of released checkpoints, most with fewer layers, and small ones like them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import internvl
import llava15
import qwen_vl
import torch
from cases import Inputs

# What Qwen's tokenizers add to 151,643 byte-level entries.
QWEN_WORDS = 151643 - qwen_vl.BYTE_LEVEL_SIZE
QWEN_SPECIALS = (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
    + ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"]
    + ["<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
)
INTERNVL_SPECIALS = (
    [*QWEN_SPECIALS, "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"]
    + ["<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<img>", "</img>"]
    + ["<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"]
)
TOWER_LAYERS, DECODER_LAYERS = 4, 4
# Frames a second that make a temporal patch last one: of fractions transformers 5.17 and 5.23 make
# different positions.
WHOLE_SECONDS = 2.0

LLAVA_15_7B = llava15.LlavaShape(
    vision={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "projection_dim": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    text={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    image_id=32000,
    vocab_size=32064,
    picture=(640, 480),
    taps=llava15.KEPT_TAPS,
)
LLAVA_15_SMALL = llava15.LlavaShape(
    vision=llava15.TINY.vision | {"num_hidden_layers": 5, "image_size": 84},
    text=llava15.TINY.text | {"num_hidden_layers": 4},
    image_id=1000,
    vocab_size=1032,
    picture=(160, 120),
    taps=llava15.KEPT_TAPS,
)

QWEN2_5_VL_7B = dataclasses.replace(
    qwen_vl.QWEN2_5_VL,
    seed=22,
    vision={
        "depth": TOWER_LAYERS,
        "fullatt_block_indexes": [1, 3],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    text={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": DECODER_LAYERS,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
    },
    rope={"rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    min_pixels=3136,
    max_pixels=12845056,
    vocabulary=qwen_vl.Vocabulary(152064, QWEN_SPECIALS, QWEN_WORDS),
    # 23 x 17 and 12 x 8 cells: no multiples of a window of 4 x 4.
    inputs=Inputs(one=(645, 483), two=(), clip=(322, 238), frames=5, fps=WHOLE_SECONDS),
)
QWEN2_5_VL_SMALL = dataclasses.replace(
    qwen_vl.QWEN2_5_VL,
    seed=23,
    vision=qwen_vl.QWEN2_5_VL.vision | {"depth": 4, "fullatt_block_indexes": [1, 3]},
    text={"num_hidden_layers": 4},
    max_pixels=8192,
    inputs=Inputs(one=(91, 67), two=(), clip=(45, 35), fps=WHOLE_SECONDS),
)

QWEN3_VL_8B = dataclasses.replace(
    qwen_vl.QWEN3_VL,
    seed=24,
    vision={
        "deepstack_visual_indexes": [0, 1, 3],
        "depth": TOWER_LAYERS,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    text={
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": DECODER_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    },
    rope={"rope_theta": 5000000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    min_pixels=65536,
    max_pixels=16777216,
    video_pixels=(4096, 25165824),
    vocabulary=qwen_vl.Vocabulary(151936, QWEN_SPECIALS, QWEN_WORDS),
    inputs=Inputs(one=(645, 483), two=(), clip=(322, 238), frames=7),
)
QWEN3_VL_SMALL = dataclasses.replace(
    qwen_vl.QWEN3_VL,
    seed=25,
    vision=qwen_vl.QWEN3_VL.vision | {"depth": 5, "deepstack_visual_indexes": [0, 2, 4]},
    text={"head_dim": 16, "num_hidden_layers": 4},
    max_pixels=8192,
    inputs=Inputs(one=(91, 67), two=(), clip=(45, 35), frames=7),
)

INTERNVL3_8B = internvl.InternVLSpec(
    "",
    "",
    26,
    text={
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": DECODER_LAYERS,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151674,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000000.0, "factor": 2.0},
    },
    vision=internvl.VISION
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": TOWER_LAYERS,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    },
    specials=INTERNVL_SPECIALS,
    words=QWEN_WORDS,
    tiles=12,
    # 3 x 2 tiles and a thumbnail; a frame is one tile.
    inputs=Inputs(one=(797, 531), two=(), clip=(322, 238), frames=2, fps=None),
)
INTERNVL_SMALL = dataclasses.replace(
    internvl.INTERNVL,
    seed=27,
    text=internvl.INTERNVL.text | {"num_hidden_layers": 4},
    vision=internvl.VISION | {"num_hidden_layers": 4},
    inputs=Inputs(one=(91, 67), two=(), clip=(45, 35), frames=3, fps=None),
)

KINDS = frozenset(["one_image", "video", "text_only"])


# Writes the folder of a name below a root; the number is added to the seed of the weights.
Writer = Callable[[Path, str, int], None]


def writers(dtype: torch.dtype, device: str) -> dict[str, Writer]:
    """The writer of each shape."""

    def llava(shape: llava15.LlavaShape) -> Writer:
        def write(root: Path, name: str, more: int) -> None:
            spec = llava15.LlavaSpec(name, "random weights", 21 + more, shape=shape)
            llava15.llava_half(root, spec, dtype, device)

        return write

    def spec_of(
        half: Callable[..., None], spec: qwen_vl.QwenSpec | internvl.InternVLSpec
    ) -> Writer:
        def write(root: Path, name: str, more: int) -> None:
            change = {"name": name, "description": "random weights", "seed": spec.seed + more}
            kept = {"dtype": dtype, "cases": KINDS}
            half(root, dataclasses.replace(spec, **change, **kept), device)

        return write

    return {
        "llava-1.5-7b": llava(LLAVA_15_7B),
        "qwen2.5-vl-7b": spec_of(qwen_vl.qwen_half, QWEN2_5_VL_7B),
        "qwen3-vl-8b": spec_of(qwen_vl.qwen_half, QWEN3_VL_8B),
        "internvl3-8b": spec_of(internvl.internvl_half, INTERNVL3_8B),
        "small-llava-1.5": llava(LLAVA_15_SMALL),
        "small-qwen2.5-vl": spec_of(qwen_vl.qwen_half, QWEN2_5_VL_SMALL),
        "small-qwen3-vl": spec_of(qwen_vl.qwen_half, QWEN3_VL_SMALL),
        "small-internvl": spec_of(internvl.internvl_half, INTERNVL_SMALL),
    }

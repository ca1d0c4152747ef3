"""Golden folders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import templates
import torch
from cases import (
    IDS_ONLY,
    Cases,
    Inputs,
    Keep,
    Request,
    Run,
    Tap,
    attempt,
    byte_level_tokenizer,
    load_json,
    write_names,
)
from common import Golden, json_text, redraw, require
from half import record_half
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

BYTE_LEVEL_SIZE, VOCAB_SIZE = 320, 336
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PATCH, MERGE = 4, 2
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tiny byte-level vocabulary, `words` entries that no text becomes, then added tokens."""

    size: int  # rows of the embeddings
    specials: list[str]
    words: int = 0


@dataclasses.dataclass
class QwenSpec:
    """One checkpoint: its classes, its configuration and how its files are laid out."""

    name: str
    description: str
    seed: int
    model_class: type
    config_class: type
    processor_class: type
    vision: dict[str, Any]
    text: dict[str, Any]
    rope: dict[str, Any]
    tied: bool = False
    published: bool = True  # files and keys as on the hub; otherwise as transformers 5 saves
    template: str = templates.QWEN2_VL
    min_pixels: int = 256
    max_pixels: int = 1024
    video_pixels: tuple[int, int] = (1024, 2800)  # Qwen3-VL: of all frames together
    vocabulary: Vocabulary = Vocabulary(VOCAB_SIZE, SPECIALS)
    dtype: torch.dtype = torch.float32  # of the saved weights
    inputs: Inputs | None = None  # none: those of the tiny checkpoints
    cases: frozenset[str] = frozenset()  # kinds that are recorded; none: all of them

    @property
    def ids(self) -> dict[str, int]:
        """Ids of the added tokens."""
        first = BYTE_LEVEL_SIZE + self.vocabulary.words
        return {token: first + i for i, token in enumerate(self.vocabulary.specials)}

    @property
    def root_ids(self) -> dict[str, int]:
        """Fields of the configuration."""
        names = ("vision_start", "vision_end", "image", "video")
        tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        return {f"{name}_token_id": self.ids[t] for name, t in zip(names, tokens, strict=True)}

    @property
    def text_fields(self) -> dict[str, Any]:
        """Fields of the decoder's configuration, but for RoPE."""
        ends = {"bos_token_id": self.ids["<|endoftext|>"], "eos_token_id": self.ids["<|im_end|>"]}
        return TEXT | {"vocab_size": self.vocabulary.size} | ends | self.text

    @property
    def patches(self) -> dict[str, int]:
        """Fields of the picture and clip processors."""
        fields = {"patch_size": self.vision["patch_size"], "temporal_patch_size": 2}
        return fields | {"merge_size": MERGE}


def qwen_config(spec: QwenSpec) -> Any:
    """The configuration in the form of transformers 5."""
    rope = {"rope_type": "default"} | spec.rope
    return spec.config_class(
        text_config=spec.text_fields | {"rope_parameters": rope},
        vision_config=spec.vision,
        tie_word_embeddings=spec.tied,
        **spec.root_ids,
    )


def published_config(spec: QwenSpec) -> dict[str, Any]:
    """config.json as the hub has it: Qwen2-VL and 2.5 flat, Qwen3-VL nested."""
    head = {"architectures": [spec.model_class.__name__]}
    theta = spec.rope["rope_theta"]
    sections = spec.rope["mrope_section"]
    vision = dict(spec.vision)
    text, ids = spec.text_fields, spec.root_ids
    dtype = str(spec.dtype).removeprefix("torch.")
    common = {
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": theta,
        "use_cache": True,
    }
    model_type = spec.config_class.model_type
    if model_type == "qwen3_vl":
        scaling = {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"}
        nested = {"model_type": "qwen3_vl_text", "attention_bias": False, "dtype": dtype}
        return head | {
            "image_token_id": ids["image_token_id"],
            "model_type": model_type,
            "text_config": nested | text | common | {"rope_scaling": scaling},
            "tie_word_embeddings": spec.tied,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": ids["video_token_id"],
            "vision_config": {"model_type": "qwen3_vl", "in_channels": 3} | vision,
            "vision_end_token_id": ids["vision_end_token_id"],
            "vision_start_token_id": ids["vision_start_token_id"],
        }
    vision |= {"in_chans": 3, "spatial_patch_size": spec.vision["patch_size"]}
    inert = {"max_window_layers": 2, "sliding_window": 32768, "use_sliding_window": False}
    return (
        head
        | {name: text[name] for name in ("bos_token_id", "eos_token_id")}
        | ids
        | {"vision_token_id": spec.ids["<|vision_pad|>"]}
        | text
        | common
        | inert
        | {
            "model_type": model_type,
            "tie_word_embeddings": spec.tied,
            "torch_dtype": dtype,
            "transformers_version": "4.41.2",
            "vision_config": vision,
            "rope_scaling": {"type": "mrope", "mrope_section": sections},
        }
    )


def save_qwen(folder: Path, spec: QwenSpec, device: str = "cpu") -> Any:
    """Writes weights, configuration, tokenizer and processor, and returns the model."""
    torch.manual_seed(spec.seed)
    with torch.device(device):
        model = spec.model_class(qwen_config(spec)).eval()
    ids, vocabulary = spec.ids, spec.vocabulary
    end = ids["<|im_end|>"]
    quiet = {*range(ids["<|endoftext|>"], vocabulary.size)} - {end}
    redraw(model, spec.seed, quiet_rows=sorted(quiet), loud_row=end)
    generation = model.generation_config
    generation.do_sample, generation.repetition_penalty = False, 1.0
    generation.bos_token_id = generation.pad_token_id = ids["<|endoftext|>"]
    generation.eos_token_id = [end, ids["<|endoftext|>"]]
    model.to(spec.dtype).save_pretrained(folder, max_shard_size="4GB")

    tokenizer = byte_level_tokenizer(BYTE_LEVEL_SIZE, vocabulary.specials, words=vocabulary.words)
    require(
        tokenizer.convert_tokens_to_ids(vocabulary.specials) == list(ids.values()),
        "a special id moved.",
    )
    qwen3 = spec.config_class is Qwen3VLConfig
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if qwen3 else {}
    size = {"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels}
    image = Qwen2VLImageProcessor(**spec.patches, **half, size=size)
    if qwen3:
        least, most = spec.video_pixels
        video = Qwen3VLVideoProcessor(
            **spec.patches, size={"shortest_edge": least, "longest_edge": most}
        )
    else:
        video = Qwen2VLVideoProcessor(**spec.patches, size=size)
    processor = spec.processor_class(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=video,
        chat_template=spec.template,
    )
    processor.save_pretrained(folder)
    if spec.published:
        publish(folder, spec, image, video)
    else:
        image.save_pretrained(folder)
    return model


def publish(folder: Path, spec: QwenSpec, image: Any, video: Any) -> None:
    """Rewrites configuration, processor and template files in the layout of the hub."""
    (folder / "config.json").write_text(json_text(published_config(spec)))
    (folder / "processor_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json_text({"chat_template": spec.template}))
    name = spec.processor_class.__name__
    if spec.config_class is Qwen3VLConfig:
        kept = {"size": {"longest_edge": spec.max_pixels, "shortest_edge": spec.min_pixels}}
        least, most = spec.video_pixels
        video_file = {"size": {"longest_edge": most, "shortest_edge": least}} | spec.patches
        video_file |= {"image_mean": list(video.image_mean), "image_std": list(video.image_std)}
        video_file |= {"processor_class": name, "video_processor_type": "Qwen3VLVideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json_text(video_file))
        kept |= spec.patches
        image_type = "Qwen2VLImageProcessorFast"
    else:
        kept = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
        kept |= spec.patches
        image_type = "Qwen2VLImageProcessor"
    kept |= {"image_mean": list(image.image_mean), "image_std": list(image.image_std)}
    kept |= {"image_processor_type": image_type, "processor_class": name}
    (folder / "preprocessor_config.json").write_text(json_text(kept))
    tokenizer = load_json(folder / "tokenizer_config.json")
    tokenizer |= {"chat_template": spec.template, "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json_text(tokenizer))


def qwen_taps(model: Any) -> list[Tap]:
    """The tower's taps; blocks are in the order in which the tower has them (window order)."""
    tower = model.visual
    taps = [Tap(tower.patch_embed, "vision.patch_embed")]
    taps += [Tap(block, f"vision.layer.{k}") for k, block in enumerate(tower.blocks)]
    taps += [Tap(tower.merger, "projector_out")]
    for k, merger in enumerate(getattr(tower, "deepstack_merger_list", [])):
        taps.append(Tap(merger, f"deepstack.{k}"))
    return taps


GRID_NAMES = ("vision_pos_ids", "cu_seqlens", "window_index", "cu_window_seqlens")


class QwenCases(Cases):
    """The cases of one folder: grids, windows, and a picture below and one above the areas."""

    def __init__(self, folder: Path, spec: QwenSpec, device: str = "cpu") -> None:
        self.spec = spec
        golden = Golden(folder, spec.description, spec.seed)
        golden.manifest["family"] = spec.config_class.model_type
        run = Run(folder, spec.model_class, qwen_taps, device=device)
        # The first picture is neither enlarged nor shrunk and its grid is no multiple of a window.
        frames = 7 if spec.config_class is Qwen3VLConfig else 5
        inputs = spec.inputs or Inputs(one=(43, 27), two=((12, 9), (70, 90)), frames=frames)
        super().__init__(run, golden, spec.seed, inputs, spec.cases)

    def windows(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The order of the cells and the bounds of the windows, or None where there are none."""
        config = self.run.model.config.vision_config
        if not hasattr(config, "window_size"):
            return None
        return get_vision_window_index(
            grid,
            spatial_merge_size=MERGE,
            window_size=config.window_size,
            patch_size=config.patch_size,
        )

    def reorder(self, inputs: dict[str, Any], taps: dict[str, torch.Tensor]) -> None:
        """The merger's rows are in window order; the features are not."""
        for prefix, which in (("", "image"), ("video.", "video")):
            grid = inputs.get(f"{which}_grid_thw")
            windows = None if grid is None else self.windows(grid)
            if windows is not None:
                name = f"{prefix}projector_out"
                taps[name] = taps[name][windows[0].argsort()]

    def grid_taps(self, prefix: str, grid: torch.Tensor, taps: dict[str, torch.Tensor]) -> None:
        """Adds what follows from a grid: places, segments, windows."""
        taps[f"{prefix}vision_pos_ids"] = get_vision_position_ids(grid, MERGE)
        taps[f"{prefix}cu_seqlens"] = get_vision_cu_seqlens(grid)
        windows = self.windows(grid)
        if windows is not None:
            taps[f"{prefix}window_index"] = windows[0]
            taps[f"{prefix}cu_window_seqlens"] = windows[1].unique_consecutive()

    def extra(
        self,
        case: str,
        request: Request,
        inputs: dict[str, Any],
        taps: dict[str, torch.Tensor],
        keep: Keep,
    ) -> None:
        """Adds grids and bytes."""
        self.golden.add(f"{case}.mm_token_type_ids", inputs["mm_token_type_ids"][0])
        if not keep.vision:
            return
        for prefix, which in (("", "image"), ("video.", "video")):
            grid = inputs.get(f"{which}_grid_thw")
            if grid is not None:
                self.grid_taps(prefix, grid, taps)
                for name in GRID_NAMES:
                    if prefix + name in taps:
                        self.golden.add(f"{case}.{prefix}{name}", taps.pop(prefix + name))
        self.add_bytes(case, request, inputs)

    def add_bytes(self, case: str, request: Request, inputs: dict[str, Any]) -> None:
        """Adds the resized pixels as bytes, in the patch order of the model's input."""
        run = self.run
        if request.images:
            raw = run.processor.image_processor(
                run.pictures(request), do_rescale=False, do_normalize=False, return_tensors="pt"
            )["pixel_values"]
            self.golden.add(f"{case}.patches_u8.torchvision", raw.to(torch.uint8))
        if request.videos:
            clips = [video.frames[run.taken(video)] for video in request.videos]
            raw = run.processor.video_processor(
                clips,
                do_rescale=False,
                do_normalize=False,
                do_sample_frames=False,
                return_tensors="pt",
            )["pixel_values_videos"]
            require(
                raw.shape == inputs["pixel_values_videos"].shape,
                f"{case} does not say which frames were taken.",
            )
            self.golden.add(f"{case}.video.patches_u8.torchvision", raw.to(torch.uint8))

    def template_options(self) -> dict[str, Any]:
        """Numbers for the pictures."""
        return {"add_vision_id": True}

    def unwrapped(self, video: Request) -> Request:
        """The clip's prompt as transformers before 5.10 expands it.

        Those replaced the template's pair around the clip as well, later ones keep it around the
        frames' own pairs.
        """
        pair = "<|vision_start|><|video_pad|><|vision_end|>"
        prompt = self.run.prompt(video)
        require(pair in prompt, "the template put no pair around the clip.")
        return dataclasses.replace(video, prompt=prompt.replace(pair, "<|video_pad|>"))

    def accepts_clip(self, request: Request, result: Any) -> bool:
        """Both prompts of Qwen3-VL's clip have to be fit."""
        if self.spec.config_class is not Qwen3VLConfig:
            return True
        return attempt(self.run, self.unwrapped(request)) is not None

    def after_video(self, request: Request) -> None:
        """Qwen3-VL: the other prompt of the clip."""
        if self.spec.config_class is Qwen3VLConfig:
            other = self.unwrapped(request)
            self.record("video_unwrapped", other, attempt(self.run, other), IDS_ONLY)


QWEN2_5_VL = QwenSpec(
    "qwen2_5_vl",
    "Qwen2.5-VL in the layout of the hub: windows of 2 x 2 cells, full attention in block 1",
    31,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    vision={
        "depth": 3,
        "hidden_act": "silu",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    text={},
    rope={"rope_theta": 1000000.0, "mrope_section": [1, 2, 3]},
)


QWEN2_VL = QwenSpec(
    "qwen2_vl",
    "Qwen2-VL as transformers 5 saves it: an own lm_head, full attention in every block",
    32,
    Qwen2VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    vision={
        "depth": 2,
        "embed_dim": 24,
        "hidden_size": 48,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    },
    text={},
    rope={"rope_theta": 1000000.0, "mrope_section": [1, 2, 3]},
    published=False,
    cases=frozenset(["one_image", "two_images", "video", "image_and_video"]),
)
QWEN2_VL_TIED = dataclasses.replace(
    QWEN2_VL,
    name="qwen2_vl_tied",
    description="Qwen2-VL in the layout of the hub, lm_head tied to the embeddings and absent",
    seed=33,
    tied=True,
    published=True,
    cases=frozenset(["one_image", "video", "text_only", "two_turns", "eos"]),
)
QWEN3_VL = QwenSpec(
    "qwen3_vl",
    "Qwen3-VL in the layout of the hub: deepstack after two layers, a video with timestamps",
    34,
    Qwen3VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    vision={
        "deepstack_visual_indexes": [0, 2],
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 36,
        "out_hidden_size": 48,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    },
    text={"head_dim": 16, "num_hidden_layers": 3},
    rope={"rope_theta": 5000000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    template=templates.QWEN3_VL,
)
SPECS = [QWEN2_5_VL, QWEN2_VL, QWEN2_VL_TIED, QWEN3_VL]


def qwen_folder(root: Path, spec: QwenSpec) -> None:
    """One folder with every case."""
    folder = root / spec.name
    model = save_qwen(folder, spec)
    write_names(folder, model)
    cases = QwenCases(folder, spec)
    if spec.tied:
        cases.first = Keep(decoder=False, pixels=True)
        cases.clip = cases.second
    cases.all()


def qwen_half(root: Path, spec: QwenSpec, device: str = "cpu") -> None:
    """One folder with half-precision weights (half.py)."""
    folder = root / spec.name
    save_qwen(folder, spec, device)
    cases = QwenCases(folder, spec, device)
    record_half(cases, Run(folder, spec.model_class, qwen_taps, spec.dtype, device))


def folders() -> dict[str, Callable[[Path], None]]:
    """The folders of the family: name -> function that writes it below a root."""
    return {spec.name: (lambda root, spec=spec: qwen_folder(root, spec)) for spec in SPECS}

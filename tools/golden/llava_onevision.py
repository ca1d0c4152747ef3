"""Golden folders of LLaVA-OneVision, and of LLaVA with its tower and decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import templates
import torch
from anyres import AnyresCases, patch_rows, projector_taps
from cases import (
    Cases,
    Inputs,
    Keep,
    Request,
    Run,
    Tap,
    byte_level_tokenizer,
    search,
    turn,
    write_names,
)
from common import Golden, redraw, require
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    Qwen2Config,
    SiglipImageProcessor,
    SiglipVisionConfig,
)
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

BYTE_LEVEL_SIZE, VOCAB_SIZE = 320, 336
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
IDS = {token: BYTE_LEVEL_SIZE + i for i, token in enumerate(SPECIALS)}
SIDE, PATCH = 30, 7  # a grid of 4 x 4: two columns and rows of pixels are left out
ROWS = (SIDE // PATCH) ** 2
PINPOINTS = [[SIDE * h, SIDE * w] for h in range(1, 4) for w in range(1, 4)]
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": IDS["<|endoftext|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "pad_token_id": IDS["<|endoftext|>"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def redrawn(model: Any, seed: int) -> Any:
    """The model with drawn weights and greedy generation."""
    end = IDS["<|im_end|>"]
    quiet = sorted({*range(BYTE_LEVEL_SIZE, VOCAB_SIZE)} - {end})
    redraw(model, seed, quiet_rows=quiet, loud_row=end)
    generation = model.generation_config
    generation.do_sample, generation.repetition_penalty = False, 1.0
    generation.bos_token_id = generation.pad_token_id = IDS["<|endoftext|>"]
    generation.eos_token_id = [end, IDS["<|endoftext|>"]]
    return model


def tokenizer() -> Any:
    """Qwen2's pipeline with the placeholders of this family."""
    fast = byte_level_tokenizer(
        BYTE_LEVEL_SIZE,
        SPECIALS,
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )
    require(fast.convert_tokens_to_ids(SPECIALS) == list(IDS.values()), "a special id moved.")
    return fast


def siglip_taps(model: Any) -> list[Tap]:
    """The SigLIP tower's taps and the projector's ends."""
    tower = model.vision_tower
    layers = tower.encoder.layers
    taps = [
        Tap(tower.embeddings.patch_embedding, "vision.patch_embed", patch_rows),
        Tap(tower.embeddings, "vision.embeddings"),
    ]
    taps += [Tap(layer, f"vision.layer.{k}") for k, layer in enumerate(layers)]
    taps += [Tap(layers[-1], "vision.selected")]
    return taps + projector_taps(model)


# ---------------------------------------------------------------- LLaVA-OneVision


class OnevisionRun(Run):
    """Several pictures in one conversation go as a list of their own when asked for."""

    nested = False

    def pictures(self, request: Request) -> Any:
        """The pictures; nested: as the pictures of one prompt, which are then not tiled."""
        pictures = [PIL.Image.fromarray(image) for _, image in request.images]
        return [pictures] if self.nested else pictures


class OnevisionCases(AnyresCases):
    """A picture whose features are resampled, two that are not, several untiled, a clip."""

    def __init__(self, folder: Path, description: str, seed: int) -> None:
        golden = Golden(folder, description, seed)
        golden.manifest["family"] = "llava_onevision"
        run = OnevisionRun(folder, LlavaOnevisionForConditionalGeneration, siglip_taps)
        # 2 x 3 tiles whose features are resampled to 4 x 6; smaller canvases, not resampled.
        inputs = Inputs(one=(83, 51), two=((23, 31), (29, 57)), frames=3, fps=None)
        super().__init__(run, golden, seed, inputs, frozenset())

    def counts(self, inputs: dict[str, Any]) -> list[int]:
        """Tiles of each picture; one for a picture among several."""
        counts = [
            image_size_to_num_patches(size, PINPOINTS, SIDE)
            for size in inputs["image_sizes"].tolist()
        ]
        return [1] * len(counts) if self.run.nested else counts

    def after_first(self, first: Request) -> None:
        """Several pictures in one prompt: padded to squares, one tile and a newline each."""
        self.run.nested = True
        try:

            def several(seed: int) -> Request:
                sizes = ((41, 27), (33, 50))
                pictures = [self.picture(k + 3, seed + k, sizes[k]) for k in range(2)]
                return Request([turn("<image>", "<image>", "how are they different?")], pictures)

            request, result = search(self.run, "several images", self.seed, several)
            self.record("several_images", request, result, self.second)
            self.golden.manifest["cases"][-1]["untiled"] = True
        finally:
            self.run.nested = False
        tokens = self.golden.manifest["cases"][-1]["image_tokens"]
        require(tokens == 2 * (ROWS + 1), f"two untiled pictures gave {tokens} tokens.")


def onevision_folder(root: Path) -> None:
    """LLaVA-OneVision: SigLIP, anyres_max_2, pictures and a clip."""
    folder, seed = root / "llava_onevision", 61
    torch.manual_seed(seed)
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Qwen2Config(**TEXT, tie_word_embeddings=False),
        image_token_index=IDS["<image>"],
        video_token_index=IDS["<video>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
        tie_word_embeddings=False,
    )
    model = redrawn(LlavaOnevisionForConditionalGeneration(config).eval(), seed)
    model.save_pretrained(folder, max_shard_size="4GB")
    size = {"height": SIDE, "width": SIDE}
    image = LlavaOnevisionImageProcessor(**HALF, size=size, image_grid_pinpoints=PINPOINTS)
    processor = LlavaOnevisionProcessor(
        image_processor=image,
        tokenizer=tokenizer(),
        video_processor=LlavaOnevisionVideoProcessor(**HALF, size=size),
        num_image_tokens=ROWS,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=templates.ONEVISION,
    )
    processor.save_pretrained(folder)
    image.save_pretrained(folder)
    write_names(folder, model)
    description = "LLaVA-OneVision: SigLIP, features resampled above anyres_max_2, a clip, Qwen2"
    cases = OnevisionCases(folder, description, seed)
    cases.all()
    found = {case["kind"]: case for case in cases.golden.manifest["cases"]}
    require(
        found["one_image"]["image_tokens"] == ROWS + 4 * 6 + 4,
        "the picture of the first case was not resampled to 4 x 6.",
    )
    require(found["video"]["video_tokens"] == 3 * 4 + 1, "a frame did not give 4 rows.")


# ---------------------------------------------------------------- LLaVA, SigLIP and Qwen2


class InterleaveCases(Cases):
    """Pictures squeezed to a square, any number in a prompt."""

    def extra(
        self,
        case: str,
        request: Request,
        inputs: dict[str, Any],
        taps: dict[str, torch.Tensor],
        keep: Keep,
    ) -> None:
        """Adds the resized pictures as bytes."""
        if not request.images or not keep.vision:
            return
        require(
            torch.equal(taps["vision.selected"], taps.pop("projector_in")),
            "the projector got other features than the selected ones.",
        )
        raw = self.run.processor.image_processor(
            self.run.pictures(request), do_rescale=False, do_normalize=False, return_tensors="pt"
        )["pixel_values"]
        self.golden.add(f"{case}.tiles_u8.torchvision", raw.to(torch.uint8).permute(0, 2, 3, 1))


def interleave_folder(root: Path) -> None:
    """LLaVA as the interleave checkpoints have it: SigLIP, every row of the last layer, Qwen2."""
    folder, seed = root / "llava_interleave", 62
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Qwen2Config(**TEXT, tie_word_embeddings=True),
        image_token_index=IDS["<image>"],
        image_seq_length=ROWS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = redrawn(LlavaForConditionalGeneration(config).eval(), seed)
    model.save_pretrained(folder, max_shard_size="4GB")
    image = SiglipImageProcessor(**HALF, size={"height": SIDE, "width": SIDE}, resample=3)
    processor = LlavaProcessor(
        image_processor=image,
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=templates.ONEVISION,
    )
    processor.save_pretrained(folder)
    image.save_pretrained(folder)
    description = "LLaVA with SigLIP and Qwen2, all rows of the last layer, tied lm_head"
    golden = Golden(folder, description, seed)
    golden.manifest["family"] = "llava_interleave"
    run = Run(folder, LlavaForConditionalGeneration, siglip_taps)
    inputs = Inputs(one=(83, 51), two=((23, 31), (29, 57)))
    kinds = frozenset(["one_image", "two_images", "text_only"])
    InterleaveCases(run, golden, seed, inputs, kinds).all()


def folders() -> dict[str, Callable[[Path], None]]:
    """The folders of the family: name -> function that writes it below a root."""
    return {"llava_onevision": onevision_folder, "llava_interleave": interleave_folder}

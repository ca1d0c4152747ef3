"""Golden folders of LLaVA-NeXT."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import templates
import torch
from anyres import AnyresCases, patch_rows, projector_taps
from cases import Inputs, Keep, Request, Run, Tap, search, turn, write_names
from common import (
    Golden,
    llama_tokenizer,
    redraw,
    require,
    train_sentencepiece,
)
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    MistralConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

IMAGE_ID, PAD_ID, VOCAB_SIZE = 300, 301, 320
SIDE, PATCH = 28, 7
# (height, width), in the order of the released files
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "projection_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass
class NextSpec:
    """One checkpoint."""

    name: str
    description: str
    seed: int
    text: LlamaConfig | MistralConfig
    template: str
    canonical: bool  # names as the module tree has them; otherwise as transformers saves them
    cases: frozenset[str] = frozenset()


def save_next(folder: Path, spec: NextSpec) -> LlavaNextForConditionalGeneration:
    """Writes weights, configuration, tokenizer and processor, and returns the model."""
    torch.manual_seed(spec.seed)
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=spec.text,
        image_token_index=IMAGE_ID,
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=PINPOINTS,
        tie_word_embeddings=False,
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    redraw(model, spec.seed, quiet_rows=[0, 1, *range(IMAGE_ID, VOCAB_SIZE)])
    generation = model.generation_config
    generation.do_sample, generation.repetition_penalty = False, 1.0
    generation.bos_token_id, generation.eos_token_id = 1, 2
    generation.pad_token_id = PAD_ID
    model.save_pretrained(folder, max_shard_size="4GB", save_original_format=not spec.canonical)
    proto = train_sentencepiece()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=llama_tokenizer(proto, True, IMAGE_ID),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    image = LlavaNextImageProcessor(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=PINPOINTS,
    )
    processor = LlavaNextProcessor(
        image_processor=image,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=spec.template,
    )
    processor.save_pretrained(folder)
    image.save_pretrained(folder)
    return model


def next_taps(model: Any) -> list[Tap]:
    """The CLIP tower's taps and the projector's ends."""
    tower = model.vision_tower
    layers = tower.encoder.layers
    taps = [
        Tap(tower.embeddings.patch_embedding, "vision.patch_embed", patch_rows),
        Tap(tower.embeddings, "vision.embeddings"),
        Tap(tower.pre_layrnorm, "vision.pre_norm"),
    ]
    taps += [Tap(layer, f"vision.layer.{k}") for k, layer in enumerate(layers)]
    taps += [Tap(layers[-2], "vision.selected", lambda t: t[:, 1:])]
    return taps + projector_taps(model)


class NextCases(AnyresCases):
    """Landscape with an odd remainder of pixels; portrait; exact fit; an odd remainder of rows."""

    def __init__(self, folder: Path, spec: NextSpec) -> None:
        golden = Golden(folder, spec.description, spec.seed)
        golden.manifest["family"] = "llava_next"
        run = Run(folder, LlavaNextForConditionalGeneration, next_taps)
        inputs = Inputs(one=(83, 51), two=((37, 90), (56, 28)))
        kinds = spec.cases or frozenset(
            ["one_image", "repetition_penalty", "two_images", "odd_remainder"]
            + ["text_only", "two_turns", "eos"]
        )
        super().__init__(run, golden, spec.seed, inputs, kinds)
        if spec.cases:  # the tower is that of the first folder
            self.first, self.tokenizer = Keep(vision=False), False

    def counts(self, inputs: dict[str, Any]) -> list[int]:
        """Tiles of each picture by its size."""
        return [
            image_size_to_num_patches(size, PINPOINTS, SIDE)
            for size in inputs["image_sizes"].tolist()
        ]

    def after_first(self, first: Request) -> None:
        """A picture whose feature rows leave an odd remainder in the canvas."""
        if not self.wants("odd_remainder"):
            return

        def odd(seed: int) -> Request:
            return Request([turn("<image>", "is it red?")], [self.picture(3, seed, (83, 53))])

        request, result = search(self.run, "an odd remainder", self.seed, odd)
        keep = Keep(decoder=False, logits=False)
        case = self.record("odd_remainder", request, result, keep)
        rows = self.golden.tensors[f"{case}.packed_features.0"].shape[0]
        require(rows == 16 + 6 * 8 + 6, f"an odd remainder gave {rows} rows.")

    def turns(self, number: int, first: Request) -> Request:
        """Two turns without a system text, which not every template takes."""
        request = super().turns(number, first)
        return dataclasses.replace(request, messages=request.messages[1:])


SPECS = [
    NextSpec(
        "llava_next",
        "LLaVA-NeXT: Llama, template of the Vicuna checkpoints",
        51,
        LlamaConfig(**TEXT),
        templates.NEXT_VICUNA,
        canonical=False,
    ),
    NextSpec(
        "llava_next_mistral",
        "LLaVA-NeXT: Mistral without a sliding window, canonical tensor names",
        52,
        MistralConfig(**TEXT, sliding_window=None),
        templates.NEXT_MISTRAL,
        canonical=True,
        cases=frozenset(["one_image", "two_turns"]),
    ),
]


def next_folder(root: Path, spec: NextSpec) -> None:
    """One folder with its cases."""
    folder = root / spec.name
    model = save_next(folder, spec)
    if not spec.canonical:
        write_names(folder, model)
    NextCases(folder, spec).all()


def folders() -> dict[str, Callable[[Path], None]]:
    """The folders of the family: name -> function that writes it below a root."""
    return {spec.name: (lambda root, spec=spec: next_folder(root, spec)) for spec in SPECS}

"""Golden folders of InternVL: as transformers has it (-hf) and as OpenGVLab publishes it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import safetensors.torch
import sentencepiece
import templates
import torch
from cases import (
    Cases,
    Inputs,
    Keep,
    Request,
    Run,
    Tap,
    byte_level_tokenizer,
    load_json,
    write_names,
)
from common import (
    TOKENIZER_TEXTS,
    Golden,
    json_text,
    redraw,
    require,
    train_sentencepiece,
)
from half import record_half
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIDE, PATCH, TILES = 28, 7, 4  # a tile of 4 x 4 patches gives 4 rows
QWEN_SIZE, QWEN_VOCAB = 320, 336
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
INTERNLM_SIZE, INTERNLM_VOCAB = 300, 320
INTERNLM_SPECIALS = ["<|im_end|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>"]
TOKEN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [SIDE, SIDE],
    "patch_size": [PATCH, PATCH],
    "attention_bias": True,
    "norm_type": "layer_norm",
    "use_qk_norm": False,
    "use_mean_pooling": True,
}
VISION_6B = VISION | {"attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass
class InternVLSpec:
    """One checkpoint of the -hf kind."""

    name: str
    description: str
    seed: int
    text: dict[str, Any]
    vision: dict[str, Any] = dataclasses.field(default_factory=lambda: VISION)
    internlm2: bool = False  # vocabulary of InternLM2 instead of Qwen2's
    specials: list[str] = dataclasses.field(default_factory=lambda: QWEN_SPECIALS)  # of Qwen2's
    words: int = 0  # entries of Qwen2's vocabulary that no text becomes
    tiles: int = TILES
    dtype: torch.dtype = torch.float32  # of the saved weights
    inputs: Inputs | None = None  # none: those of the tiny checkpoints
    cases: frozenset[str] = frozenset()

    @property
    def vocab_size(self) -> int:
        return self.text.get("vocab_size", INTERNLM_VOCAB if self.internlm2 else QWEN_VOCAB)

    @property
    def side(self) -> int:
        """Pixels of a tile."""
        return self.vision["image_size"][0]

    @property
    def rows(self) -> int:
        """Rows that a tile becomes."""
        return (self.side // self.vision["patch_size"][0]) ** 2 // 4

    @property
    def ids(self) -> dict[str, int]:
        """Ids of the added tokens."""
        base = INTERNLM_SIZE if self.internlm2 else QWEN_SIZE + self.words
        tokens = INTERNLM_SPECIALS if self.internlm2 else self.specials
        return {token: base + i for i, token in enumerate([*tokens, "<video>"])}

    @property
    def bos_id(self) -> int:
        return 1 if self.internlm2 else self.ids["<|endoftext|>"]

    @property
    def pad_id(self) -> int:
        return 2 if self.internlm2 else self.ids["<|endoftext|>"]


# ---------------------------------------------------------------- tokenizer of InternLM2


def internlm2_sentencepiece() -> bytes:
    """A model like InternLM2's: byte fallback, nothing put before the text."""
    return train_sentencepiece(add_dummy_prefix=False)


def internlm2_tokenizer(model_proto: bytes, spec: InternVLSpec) -> PreTrainedTokenizerFast:
    """The same as tokenizer.json: U+2581 for spaces, never before the text, bos first."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
    pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces[3 + 256 :]:
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [(a, b) for a, b in splits if a in vocab and b in vocab]
    require(len(pieces) == INTERNLM_SIZE, "the sentencepiece model has another size.")
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        "\u2581", prepend_scheme="never", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    specials = ["<unk>", "<s>", "</s>", *INTERNLM_SPECIALS]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    tokenizer.add_special_tokens([AddedToken("<video>", normalized=False, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        extra_special_tokens=TOKEN_NAMES,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def internlm2_ids(model_proto: bytes, text: str) -> list[int]:
    """What the published tokenizer of InternLM2 does: cut at added tokens, then sentencepiece."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
    ids = {token: INTERNLM_SIZE + i for i, token in enumerate(INTERNLM_SPECIALS)}
    ids |= {"<unk>": 0, "<s>": 1, "</s>": 2}
    pattern = "(" + "|".join(re.escape(token) for token in ids) + ")"
    out = [1]
    for piece in re.split(pattern, text):
        out += [ids[piece]] if piece in ids else sp.encode(piece)
    return out


# ---------------------------------------------------------------- -hf


def internvl_model(spec: InternVLSpec, device: str = "cpu") -> InternVLForConditionalGeneration:
    """A model with re-drawn weights, not yet saved."""
    torch.manual_seed(spec.seed)
    ids = spec.ids
    config = InternVLConfig(
        vision_config=spec.vision,
        text_config=TEXT
        | {"vocab_size": spec.vocab_size, "bos_token_id": spec.bos_id}
        | {"eos_token_id": ids["<|im_end|>"], "pad_token_id": spec.pad_id}
        | spec.text,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=spec.rows,
        downsample_ratio=0.5,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = InternVLForConditionalGeneration(config).eval()
    end = ids["<|im_end|>"]
    quiet = {*range(min(ids.values()), spec.vocab_size)} - {end}
    quiet |= {0, 1, 2} if spec.internlm2 else set()
    redraw(model, spec.seed, quiet_rows=sorted(quiet), loud_row=end)
    generation = model.generation_config
    generation.do_sample, generation.repetition_penalty = False, 1.0
    generation.bos_token_id, generation.pad_token_id = spec.bos_id, spec.pad_id
    generation.eos_token_id = [end, spec.pad_id]
    return model.to(spec.dtype)


def save_internvl(
    folder: Path, spec: InternVLSpec, device: str = "cpu"
) -> InternVLForConditionalGeneration:
    """Writes weights, configuration, tokenizer and processor, and returns the model."""
    model = internvl_model(spec, device)
    model.save_pretrained(folder, max_shard_size="4GB")
    if spec.internlm2:
        tokenizer = internlm2_tokenizer(internlm2_sentencepiece(), spec)
    else:
        tokenizer = byte_level_tokenizer(
            QWEN_SIZE,
            [*spec.specials, "<video>"],
            words=spec.words,
            extra_special_tokens=TOKEN_NAMES,
        )
    require(
        tokenizer.convert_tokens_to_ids(list(spec.ids)) == list(spec.ids.values()),
        "an added token has another id.",
    )
    pixels = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    pixels |= {"size": {"height": spec.side, "width": spec.side}}
    image = GotOcr2ImageProcessor(
        **pixels, crop_to_patches=True, min_patches=1, max_patches=spec.tiles
    )
    processor = InternVLProcessor(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(**pixels),
        image_seq_length=model.config.image_seq_length,
        chat_template=templates.INTERNVL,
    )
    processor.save_pretrained(folder)
    image.save_pretrained(folder)
    return model


def internvl_taps(model: Any) -> list[Tap]:
    """The tower's taps and the projector's ends."""
    tower, projector = model.vision_tower, model.multi_modal_projector
    taps = [
        Tap(tower.embeddings.patch_embeddings, "vision.patch_embed"),
        Tap(tower.embeddings, "vision.embeddings"),
    ]
    taps += [Tap(layer, f"vision.layer.{k}") for k, layer in enumerate(tower.encoder.layer)]
    taps += [
        Tap(tower, "vision.selected", lambda result: result.last_hidden_state[:, 1:]),
        Tap(projector, "projector_in", before=True),
        Tap(projector, "projector_out"),
    ]
    return taps


LONG_QUESTION = "what is in the scene, and is the small circle red or not? how are they different?"


class InternVLCases(Cases):
    """The cases of one folder: tiles and thumbnails of pictures of several shapes."""

    def __init__(
        self,
        run: Run,
        golden: Golden,
        seed: int,
        kinds: frozenset[str],
        inputs: Inputs | None = None,
    ) -> None:
        if inputs is None:
            # 2 x 1 tiles and a thumbnail; one tile; 1 x 3 tiles and a thumbnail.
            inputs = Inputs(one=(83, 41), two=((33, 31), (29, 83)), frames=3, fps=None)
            if run.model.config.text_config.rope_parameters["rope_type"] == "dynamic":
                inputs = dataclasses.replace(inputs, question=LONG_QUESTION)
        super().__init__(run, golden, seed, inputs, kinds)

    def extra(
        self,
        case: str,
        request: Request,
        inputs: dict[str, Any],
        taps: dict[str, torch.Tensor],
        keep: Keep,
    ) -> None:
        """Adds the number of tiles of each picture and the tiles as bytes."""
        if not request.images and not request.videos:
            return
        run = self.run
        tiles = []
        if request.images:
            out = run.image_processors[run.backend](
                run.pictures(request),
                do_rescale=False,
                do_normalize=False,
                crop_to_patches=True,
                return_tensors="pt",
            )
            tiles.append(out["pixel_values"])
            self.golden.add(f"{case}.num_patches", torch.as_tensor(out["num_patches"]))
        if request.videos:
            out = run.processor.video_processor(
                [video.frames for video in request.videos],
                do_rescale=False,
                do_normalize=False,
                return_tensors="pt",
            )
            tiles.append(out["pixel_values_videos"].flatten(0, 1))
        if keep.vision:
            raw = torch.cat(tiles).to(torch.uint8).permute(0, 2, 3, 1)
            self.golden.add(f"{case}.tiles_u8.{run.backend}", raw)

    def turns(self, number: int, first: Request) -> Request:
        """Content that is a plain string, too."""
        request = super().turns(number, first)
        request.messages[0]["content"] = "be brief"
        return request


# ---------------------------------------------------------------- original


def original_name(name: str) -> str:
    """A canonical name as OpenGVLab has it; tensors that are packed are named after the pack."""
    rules = [
        ("model.vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
        (
            "model.vision_tower.embeddings.position_embeddings",
            "vision_model.embeddings.position_embedding",
        ),
        (
            "model.vision_tower.embeddings.patch_embeddings.projection",
            "vision_model.embeddings.patch_embedding",
        ),
        ("model.vision_tower.encoder.layer.", "vision_model.encoder.layers."),
        (".attention.projection_layer.", ".attn.proj."),
        (".attention.q_norm.", ".attn.q_norm."),
        (".attention.k_norm.", ".attn.k_norm."),
        (".layernorm_before.", ".norm1."),
        (".layernorm_after.", ".norm2."),
        ("lambda_", "ls"),
        ("model.multi_modal_projector.layer_norm.", "mlp1.0."),
        ("model.multi_modal_projector.linear_1.", "mlp1.1."),
        ("model.multi_modal_projector.linear_2.", "mlp1.3."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ]
    for old, new in rules:
        name = name.replace(old, new)
    return name


INTERNLM2_NAMES = [
    ("language_model.model.embed_tokens.", "language_model.model.tok_embeddings."),
    ("language_model.lm_head.", "language_model.output."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
]


def original_tensors(model: Any, internlm2: bool) -> dict[str, torch.Tensor]:
    """The weights under OpenGVLab's names, packed as there."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    out: dict[str, torch.Tensor] = {}
    text = model.config.text_config
    group = text.num_attention_heads // text.num_key_value_heads
    for name, tensor in state.items():
        if re.search(r"vision_tower.*attention\.[kv]_proj\.", name):
            continue
        if re.search(r"vision_tower.*attention\.q_proj\.", name):
            thirds = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            out[original_name(name).replace("attention.q_proj", "attn.qkv")] = torch.cat(thirds)
        elif internlm2 and re.search(r"self_attn\.[kv]_proj\.", name):
            continue
        elif internlm2 and "self_attn.q_proj." in name:
            q, k, v = (state[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            size = q.shape[0] // text.num_attention_heads
            rows = []  # a key/value head's queries, its keys, its values
            for j in range(text.num_key_value_heads):
                rows += [q[j * group * size : (j + 1) * group * size]]
                rows += [k[j * size : (j + 1) * size], v[j * size : (j + 1) * size]]
            packed = original_name(name).replace("self_attn.q_proj", "attention.wqkv")
            out[packed] = torch.cat(rows)
        else:
            new = original_name(name)
            for old, internlm in INTERNLM2_NAMES if internlm2 else []:
                new = new.replace(old, internlm)
            out[new] = tensor
    return out


@dataclasses.dataclass
class OriginalSpec:
    """A checkpoint of an -hf spec in OpenGVLab's layout."""

    name: str
    description: str
    of: InternVLSpec
    template: str
    system: str | None  # system_message of config.json; none: the template's own
    cases: frozenset[str]


# The text of the template internlm2-chat of OpenGVLab/InternVL's conversation.py.
SYSTEM_INTERNLM2_CHAT = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，"
    "英文名叫InternVL, 是一个有用无害的人工智能助手。"
)


def original_config(spec: OriginalSpec, model: Any) -> dict[str, Any]:
    """config.json of InternVLChatModel."""
    text, vision = model.config.text_config, model.config.vision_config
    internlm2 = spec.of.internlm2
    llm = {
        "architectures": ["InternLM2ForCausalLM" if internlm2 else "Qwen2ForCausalLM"],
        "attn_implementation": "eager",
        "bos_token_id": spec.of.bos_id,
        "eos_token_id": 2 if internlm2 else spec.of.ids["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": text.intermediate_size,
        "max_position_embeddings": text.max_position_embeddings,
        "model_type": "internlm2" if internlm2 else "qwen2",
        "num_attention_heads": text.num_attention_heads,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": text.num_key_value_heads,
        "pad_token_id": spec.of.pad_id,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": text.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": text.vocab_size,
    }
    if text.rope_parameters["rope_type"] == "dynamic":
        llm["rope_scaling"] = {"factor": text.rope_parameters["factor"], "type": "dynamic"}
    llm |= {"bias": False} if internlm2 else {"sliding_window": None, "use_sliding_window": False}
    tower = {
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": vision.hidden_size,
        "image_size": SIDE,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": vision.intermediate_size,
        "layer_norm_eps": vision.layer_norm_eps,
        "model_type": "intern_vit_6b",
        "norm_type": vision.norm_type,
        "num_attention_heads": vision.num_attention_heads,
        "num_channels": 3,
        "num_hidden_layers": vision.num_hidden_layers,
        "patch_size": PATCH,
        "qk_normalization": vision.use_qk_norm,
        "qkv_bias": vision.attention_bias,
        "torch_dtype": "float32",
        "use_flash_attn": False,
    }
    config = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
        },
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": SIDE,
        "llm_config": llm,
        "max_dynamic_patch": TILES,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": spec.template,
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": tower,
    }
    return config | ({"system_message": spec.system} if spec.system is not None else {})


def save_original(folder: Path, spec: OriginalSpec, model: Any) -> None:
    """Writes the checkpoint in OpenGVLab's layout."""
    tensors = original_tensors(model, spec.of.internlm2)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json_text(original_config(spec, model)))
    ids = spec.of.ids
    ends = [ids["<|im_end|>"], ids["<|im_start|>"]]
    generation = {"eos_token_id": ends} if spec.of.internlm2 else {"_from_model_config": True}
    (folder / "generation_config.json").write_text(
        json_text(generation | {"transformers_version": "4.37.2"})
    )
    (folder / "preprocessor_config.json").write_text(
        json_text(
            {
                "crop_size": SIDE,
                "do_center_crop": True,
                "do_normalize": True,
                "do_resize": True,
                "feature_extractor_type": "CLIPFeatureExtractor",
                "image_mean": IMAGENET_MEAN,
                "image_std": IMAGENET_STD,
                "resample": 3,
                "size": SIDE,
            }
        )
    )
    added = {token: id for token, id in ids.items() if token != "<video>"}
    (folder / "added_tokens.json").write_text(json_text(added))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    flags["special"] = True
    known = {"<unk>": 0, "<s>": 1, "</s>": 2} if spec.of.internlm2 else {}
    tokenizer = {
        "added_tokens_decoder": {
            str(id): {"content": token} | flags for token, id in (known | added).items()
        },
        "additional_special_tokens": list(added),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    if spec.of.internlm2:
        tokenizer |= {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>"}
        tokenizer |= {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
        tokenizer["tokenizer_class"] = "InternLM2Tokenizer"
        (folder / "tokenizer.model").write_bytes(internlm2_sentencepiece())
    else:
        tokenizer |= {"add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>"}
        tokenizer |= {"errors": "replace", "pad_token": "<|endoftext|>", "unk_token": None}
        tokenizer |= {"split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json_text(tokenizer))
    special = {k: tokenizer[k] for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
    special = {k: v for k, v in special.items() if v is not None}
    special["additional_special_tokens"] = list(added)
    (folder / "special_tokens_map.json").write_text(json_text(special))


class PilFrames:
    """The video processor of the original code, which reads frames as it does pictures."""

    def __init__(self, frames: Any, pictures: Any) -> None:
        self.frames, self.pictures = frames, pictures

    def __getattr__(self, name: str) -> Any:
        return getattr(self.frames, name)

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        """pixel_values_videos of clips of equal length."""
        steps = {k: options[k] for k in ("do_rescale", "do_normalize") if k in options}
        clips = [
            self.pictures(
                [PIL.Image.fromarray(np.asarray(frame)) for frame in video],
                crop_to_patches=False,
                return_tensors="pt",
                **steps,
            )["pixel_values"]
            for video in videos
        ]
        return {"pixel_values_videos": torch.stack(clips)}


class OriginalRun(Run):
    """The -hf model with the pictures, prompts and ids of the original code."""

    backend = "pil"

    def __init__(self, folder: Path, spec: OriginalSpec, hf_folder: Path) -> None:
        super().__init__(hf_folder, InternVLForConditionalGeneration, internvl_taps)
        self.folder, self.spec = folder, spec
        self.processor.image_processor = self.image_processors[self.backend]
        self.processor.video_processor = PilFrames(
            self.processor.video_processor, self.image_processors[self.backend]
        )
        if not spec.of.internlm2:
            self.original_tokenizer = Qwen2Tokenizer.from_pretrained(folder)

    def prompt(self, request: Request) -> str:
        """The conversation template; a picture is <image>, a clip a line a frame."""
        internlm2 = self.spec.template == "internlm2-chat"
        end = "<|im_end|>" if internlm2 else "<|im_end|>\n"
        system = SYSTEM_INTERNLM2_CHAT if self.spec.system is None else self.spec.system
        if request.messages[0]["role"] == "system":
            system = request.messages[0]["content"]
        text = f"<|im_start|>system\n{system}{end}"
        for message in request.messages:
            if message["role"] != "system":
                words = "".join(
                    {"image": "<image>\n", "video": "<video>\n"}.get(item["type"], "")
                    or item["text"]
                    for item in message["content"]
                )
                text += f"<|im_start|>{message['role']}\n{words}{end}"
        return text + "<|im_start|>assistant\n"

    def inputs(self, request: Request, backend: str | None = None) -> dict[str, Any]:
        """The processor's output; the original tokenizer must give the same ids."""
        prompt = self.prompt(request)
        expanded = dataclasses.replace(request, prompt=prompt.replace("<image>", "<IMG_CONTEXT>"))
        self.prompt, render = (lambda r: r.prompt), self.prompt  # type: ignore[method-assign]
        try:
            inputs = super().inputs(expanded, backend)
        finally:
            self.prompt = render  # type: ignore[method-assign]
        ids = inputs["input_ids"][0].tolist()
        text = self.processor.tokenizer.decode(ids[1:] if self.spec.of.internlm2 else ids)
        if self.spec.of.internlm2:
            ours = internlm2_ids((self.folder / "tokenizer.model").read_bytes(), text)
        else:
            ours = self.original_tokenizer(text)["input_ids"]
        require(ours == ids, f"the original tokenizer gives other ids for {prompt!r}.")
        return inputs


def vocab_and_merges(folder: Path, hf_folder: Path) -> None:
    """Writes vocab.json and merges.txt of the -hf folder's tokenizer.json."""
    model = load_json(hf_folder / "tokenizer.json")["model"]
    (folder / "vocab.json").write_text(json_text(model["vocab"]), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- folders

SOME = frozenset(["one_image", "two_images", "text_only"])
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
INTERNVL = InternVLSpec(
    "internvl",
    "InternVL -hf: InternViT-300M kind of tower, Qwen2 decoder",
    41,
    text={"model_type": "qwen2", "rms_norm_eps": 1e-6} | ROPE,
)
INTERNVL_26B = InternVLSpec(
    "internvl_26b",
    "InternVL -hf: InternViT-6B kind of tower (RMSNorm, q and k norms), InternLM2 as Llama with "
    "dynamic RoPE past max_position_embeddings 64",
    42,
    text={
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000000.0, "factor": 2.0},
    },
    vision=VISION_6B,
    internlm2=True,
    cases=SOME,
)
INTERNVL_QWEN3 = InternVLSpec(
    "internvl_qwen3",
    "InternVL3.5 -hf: Qwen3 decoder with norms of q and k and head_dim 16",
    43,
    text={"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16} | ROPE,
    cases=SOME,
)
ORIGINALS = [
    OriginalSpec(
        "internvl_original",
        "the weights of internvl as InternVL2.5 is published: InternVLChatModel, vocab.json",
        INTERNVL,
        "internvl2_5",
        "You are a helpful assistant.",
        frozenset(["one_image", "two_images", "video", "text_only", "two_turns"]),
    ),
    OriginalSpec(
        "internvl_original_internlm2",
        "the weights of internvl_26b as InternVL2-26B is published: wqkv, tokenizer.model",
        INTERNVL_26B,
        "internlm2-chat",
        None,
        frozenset(["one_image", "text_only"]),
    ),
]


def internvl_folder(root: Path, spec: InternVLSpec) -> None:
    """An -hf folder."""
    folder = root / spec.name
    model = save_internvl(folder, spec)
    if spec is INTERNVL:
        write_names(folder, model)
    golden = Golden(folder, spec.description, spec.seed)
    golden.manifest["family"] = "internvl"
    run = Run(folder, InternVLForConditionalGeneration, internvl_taps)
    cases = InternVLCases(run, golden, spec.seed, spec.cases)
    cases.tokenizer = spec is not INTERNVL_QWEN3  # it has the first folder's
    cases.all()
    if spec is INTERNVL_26B:
        lengths = {case["kind"]: case["prompt_tokens"] for case in golden.manifest["cases"]}
        require(
            lengths["one_image"] > 64 > lengths["text_only"] and lengths["text_only"] + 32 > 64,
            f"the prompts of {lengths} tokens do not straddle max_position_embeddings 64.",
        )


def internvl_half(root: Path, spec: InternVLSpec, device: str = "cpu") -> None:
    """An -hf folder with half-precision weights (half.py)."""
    folder = root / spec.name
    save_internvl(folder, spec, device)
    golden = Golden(folder, spec.description, spec.seed)
    golden.manifest["family"] = "internvl"
    run, half = (
        Run(folder, InternVLForConditionalGeneration, internvl_taps, dtype, device)
        for dtype in (torch.float32, spec.dtype)
    )
    record_half(InternVLCases(run, golden, spec.seed, spec.cases, spec.inputs), half)


def original_folder(root: Path, spec: OriginalSpec) -> None:
    """A folder in OpenGVLab's layout; numbers are the -hf model's with equal weights."""
    folder, hf_folder = root / spec.name, root / f"{spec.name}.hf"
    hf_folder.mkdir()
    try:
        save_original(folder, spec, save_internvl(hf_folder, spec.of))
        if not spec.of.internlm2:
            vocab_and_merges(folder, hf_folder)
        else:
            check_internlm2(folder, hf_folder)
        golden = Golden(folder, spec.description, spec.of.seed)
        golden.manifest["family"] = "internvl"
        cases = InternVLCases(
            OriginalRun(folder, spec, hf_folder), golden, spec.of.seed, spec.cases
        )
        # The decoder's rows are those of the -hf folder; only prompts and pixels differ.
        cases.first = Keep(decoder=False, logits=False, pixels=True)
        cases.clip = cases.second
        cases.all()
    finally:
        shutil.rmtree(hf_folder)


def check_internlm2(folder: Path, hf_folder: Path) -> None:
    """tokenizer.model and tokenizer.json must agree on every text."""
    proto = (folder / "tokenizer.model").read_bytes()
    fast = AutoTokenizer.from_pretrained(hf_folder)
    for text in TOKENIZER_TEXTS:
        require(
            internlm2_ids(proto, text) == fast(text)["input_ids"],
            f"tokenizer.json and tokenizer.model disagree on {text!r}.",
        )


def folders() -> dict[str, Callable[[Path], None]]:
    """The folders of the family: name -> function that writes it below a root."""
    writers: dict[str, Callable[[Path], None]] = {
        spec.name: (lambda root, spec=spec: internvl_folder(root, spec))
        for spec in (INTERNVL, INTERNVL_26B, INTERNVL_QWEN3)
    }
    writers |= {
        spec.name: (lambda root, spec=spec: original_folder(root, spec)) for spec in ORIGINALS
    }
    return writers

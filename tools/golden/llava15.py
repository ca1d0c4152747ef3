"""Golden folders of LLaVA-1.5."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import safetensors.torch
import torch
from common import (
    GREEDY_LOGIT_STEPS,
    GREEDY_STEPS,
    MIN_GAP,
    Golden,
    Greedy,
    first_usable,
    greedy,
    json_text,
    llama_tokenizer,
    record_tokenizer,
    redraw,
    require,
    reset_rope,
    synthetic_image,
    train_sentencepiece,
    usable,
    utf8,
)
from half import describe_difference
from tokenizers import Tokenizer
from transformers import (
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

IMAGE_ID, PAD_ID, VOCAB_SIZE = 300, 301, 320


# Taps of shapes that are too large for all of them.
KEPT_TAPS = frozenset(
    ["position_ids", "projector_in", "projector_out", "inputs_embeds", "logits_prefill"]
    + ["vision.patch_embed", "vision.embeddings", "vision.pre_norm", "vision.selected"]
    + ["vision.layer.0", "vision.layer.1", "llm.layer.0", "llm.layer.1", "llm.norm"]
)

# The prompt format of LLaVA-1.5: upper-cased role, images before text, a space after every text.
# Published checkpoints have it on one line; the SPREAD form says the same with whitespace control.
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{# images come before all text #}"
    "{% for item in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for item in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ item['text'] + ' ' }}{% endfor %}"
    "{% else %}"
    "{% for item in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ item['text'] + ' ' }}{% endgeneration %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAVA_TEMPLATE_SPREAD = """\
{%- for message in messages %}
    {%- if message['role'] != 'system' %}
        {{- message['role'].upper() + ': ' }}
    {%- endif %}
    {#- images come before all text #}
    {%- for item in message['content'] if item['type'] == 'image' %}
        {{- '<image>\n' }}
    {%- endfor %}
    {%- for item in message['content'] if item['type'] == 'text' %}
        {{- item['text'] + ' ' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}
"""


@dataclasses.dataclass
class LlavaShape:
    """Sizes of a LLaVA-1.5 checkpoint, and what of it is recorded."""

    vision: dict[str, Any]
    text: dict[str, Any]
    image_id: int  # <pad> is the next, and what follows has no token
    vocab_size: int
    picture: tuple[int, int] = (101, 75)  # width and height of the picture of llava_half
    taps: frozenset[str] | None = None  # kept by llava_half; None: all of them

    @property
    def pad_id(self) -> int:
        return self.image_id + 1


TINY = LlavaShape(
    vision={
        "hidden_size": 32,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
    text={
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    },
    image_id=IMAGE_ID,
    vocab_size=VOCAB_SIZE,
)


@dataclasses.dataclass
class LlavaSpec:
    """One LLaVA-1.5 checkpoint: what differs from the others."""

    name: str
    description: str
    seed: int
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    legacy_tokenizer: bool = True
    sentencepiece_file: bool = False
    old_layout: bool = False
    template: str = LLAVA_TEMPLATE
    shape: LlavaShape = dataclasses.field(default_factory=lambda: TINY)


def llava_config(spec: LlavaSpec) -> LlavaConfig:
    """The configuration of the spec's shape; spec.text overrides fields of the decoder."""
    shape = spec.shape
    text = LlamaConfig(
        **{
            "vocab_size": shape.vocab_size,
            **shape.text,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": shape.pad_id,
            "tie_word_embeddings": False,
        }
        | spec.text
    )
    vision = CLIPVisionConfig(**shape.vision)
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=shape.image_id,
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=shape.pad_id,
    )


def llava_model(spec: LlavaSpec, device: str = "cpu") -> LlavaForConditionalGeneration:
    """A model with re-drawn weights, made on the device, not yet saved."""
    torch.manual_seed(spec.seed)
    with torch.device(device):
        model = LlavaForConditionalGeneration(llava_config(spec)).eval()
    shape = spec.shape
    redraw(model, spec.seed, quiet_rows=[0, 1, *range(shape.image_id, shape.vocab_size)])
    config = model.generation_config
    config.do_sample, config.repetition_penalty = False, 1.0
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, shape.pad_id
    return model


def write_llava_processor(
    folder: Path, spec: LlavaSpec, tokenizer: Tokenizer, model_proto: bytes
) -> None:
    """Writes tokenizer, image processor, processor and template files as the library saves them."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    side = spec.shape.vision["image_size"]
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=fast,
        patch_size=spec.shape.vision["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=spec.template,
    )
    processor.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<image>",
        "pad_token": "<pad>",
    }
    (folder / "special_tokens_map.json").write_text(json_text(special | {"unk_token": "<unk>"}))
    if spec.sentencepiece_file:
        (folder / "tokenizer.model").write_bytes(model_proto)


def rename_llava(name: str, spelling: str) -> str:
    """A canonical name in spelling "v451" (transformers up to 4.51) or "original" (LLaVA)."""
    if spelling == "v451":
        rules = [
            ("lm_head.", "language_model.lm_head."),
            ("model.language_model.", "language_model.model."),
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ]
    else:
        rules = [
            ("model.language_model.", "model."),
            ("model.vision_tower.", "model.vision_tower.vision_tower.vision_model."),
            ("model.multi_modal_projector.linear_1.", "model.mm_projector.0."),
            ("model.multi_modal_projector.linear_2.", "model.mm_projector.2."),
        ]
    for old, new in rules:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def old_layout(folder: Path, spec: LlavaSpec) -> None:
    """Rewrites a folder as a checkpoint of 2024: old names and keys, sub-configs as differences.

    Also adds the buffers such files carry (position_ids, inv_freq), which a loader must ignore.
    """
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors = {rename_llava(name, "v451"): t for name, t in tensors.items()}
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17).reshape(1, 17)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12.0)
    for layer in range(2):
        tensors[f"language_model.model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = (
            inv_freq.clone()
        )
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})

    text = {
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 48,
        "intermediate_size": 96,
    }
    text |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB_SIZE,
    }
    text |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-05, "pad_token_id": PAD_ID}
    text |= {"rope_scaling": {"type": "linear", "factor": spec.text["rope_parameters"]["factor"]}}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "image_size": 56,
    }
    vision |= {
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "projection_dim": 32,
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": IMAGE_ID,
        "model_type": "llava",
        "pad_token_id": PAD_ID,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "float32",
        "transformers_version": "4.36.0",
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    (folder / "config.json").write_text(json_text(config))
    (folder / "processor_config.json").write_text(
        json_text(
            {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": 14,
                "processor_class": "LlavaProcessor",
                "vision_feature_select_strategy": "default",
            }
        )
    )
    (folder / "preprocessor_config.json").write_text(
        json_text(
            {
                "crop_size": {"height": 56, "width": 56},
                "do_center_crop": True,
                "do_convert_rgb": True,
                "do_normalize": True,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.48145466, 0.4578275, 0.40821073],
                "image_processor_type": "CLIPImageProcessor",
                "image_std": [0.26862954, 0.26130258, 0.27577711],
                "resample": 3,
                "rescale_factor": 0.00392156862745098,
                "size": {"shortest_edge": 56},
            }
        )
    )
    names = {0: "<unk>", 1: "<s>", 2: "</s>", IMAGE_ID: "<image>", PAD_ID: "<pad>"}
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    (folder / "tokenizer_config.json").write_text(
        json_text(
            {
                "add_bos_token": True,
                "add_eos_token": False,
                "added_tokens_decoder": {
                    str(i): {"content": token} | flags for i, token in names.items()
                },
                "bos_token": "<s>",
                "clean_up_tokenization_spaces": False,
                "eos_token": "</s>",
                "legacy": True,
                "model_max_length": 1000000000000000019884624838656,
                "pad_token": "<pad>",
                "padding_side": "left",
                "processor_class": "LlavaProcessor",
                "tokenizer_class": "LlamaTokenizer",
                "unk_token": "<unk>",
            }
        )
    )
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json_text({"chat_template": spec.template}))


class LlavaRun:
    """A saved LLaVA-1.5 checkpoint loaded back, with what is needed to record its cases."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.folder = folder
        self.model, report = LlavaForConditionalGeneration.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            device_map=None if device == "cpu" else device,
        )
        require(
            not report["missing_keys"],
            f"{folder.name} lacks the tensors {sorted(report['missing_keys'])}.",
        )
        self.model.eval()
        self.processor = LlavaProcessor.from_pretrained(folder)
        self.pil_processor = CLIPImageProcessorPil.from_pretrained(folder)
        self.eos_id = 2

    def inputs(
        self, prompt: str, images: list[np.ndarray], backend: str = "torchvision"
    ) -> dict[str, torch.Tensor]:
        """The processor's output for one prompt, with pixels from the named image backend."""
        pictures = [PIL.Image.fromarray(image) for image in images]
        inputs = dict(self.processor(images=pictures or None, text=prompt, return_tensors="pt"))
        if pictures and backend == "pil":
            inputs["pixel_values"] = self.pil_processor(pictures, return_tensors="pt")[
                "pixel_values"
            ]
        for key in inputs:
            dtype = self.model.dtype if inputs[key].is_floating_point() else inputs[key].dtype
            inputs[key] = inputs[key].to(self.model.device, dtype)
        return inputs

    def resized(self, image: np.ndarray, backend: str) -> torch.Tensor:
        """The image after the resize alone: (height, width, 3) u8."""
        processor = self.pil_processor if backend == "pil" else self.processor.image_processor
        out = processor(
            PIL.Image.fromarray(image),
            do_center_crop=False,
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )["pixel_values"][0]
        require(
            bool((out == out.to(torch.uint8)).all()),
            "the resized image is not made of whole bytes.",
        )
        return out.to(torch.uint8).permute(1, 2, 0)

    def resized_by_axis(
        self, image: np.ndarray, height: int, width: int, horizontal_first: bool
    ) -> np.ndarray:
        """Pillow's bicubic resize in two calls of one axis each, so that their order is known."""
        steps = [(width, image.shape[0]), (image.shape[1], height)]
        picture = PIL.Image.fromarray(image)
        for size in steps[:1] if horizontal_first else steps[1:]:
            picture = picture.resize(size, PIL.Image.Resampling.BICUBIC)
        return np.asarray(picture.resize((width, height), PIL.Image.Resampling.BICUBIC))

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt the chat template renders."""
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def taps(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs one prefill with hooks and returns the activation at every tap."""
        out: dict[str, torch.Tensor] = {}
        model = self.model.model
        tower, decoder = model.vision_tower, model.language_model
        handles = []

        def keep(
            module: torch.nn.Module, name: str, shape: Callable[[torch.Tensor], torch.Tensor]
        ) -> None:
            def hook(_module: torch.nn.Module, _args: Any, result: Any) -> None:
                out[name] = shape(result[0] if isinstance(result, tuple) else result)

            handles.append(module.register_forward_hook(hook))

        keep(
            tower.embeddings.patch_embedding,
            "vision.patch_embed",
            lambda t: t.flatten(2).transpose(1, 2),
        )
        keep(tower.embeddings, "vision.embeddings", lambda t: t)
        keep(tower.pre_layrnorm, "vision.pre_norm", lambda t: t)
        for k, layer in enumerate(tower.encoder.layers):
            keep(layer, f"vision.layer.{k}", lambda t: t)
        keep(model.multi_modal_projector, "projector_out", lambda t: t)
        for k, layer in enumerate(decoder.layers):
            keep(layer, f"llm.layer.{k}", lambda t: t[0])
        keep(decoder.norm, "llm.norm", lambda t: t[0])

        def projector_input(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            out["projector_in"] = args[0]

        def decoder_input(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            out["inputs_embeds"] = kwargs["inputs_embeds"][0]

        def rotary_input(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            out["position_ids"] = positions

        handles.append(model.multi_modal_projector.register_forward_pre_hook(projector_input))
        handles.append(decoder.register_forward_pre_hook(decoder_input, with_kwargs=True))
        reset_rope(self.model)
        handles.append(decoder.rotary_emb.register_forward_pre_hook(rotary_input, with_kwargs=True))
        try:
            with torch.no_grad():
                result = self.model(**inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        out["logits_prefill"] = result.logits[0]
        if "projector_in" in out:
            hidden = model.vision_tower(
                inputs["pixel_values"], output_hidden_states=True
            ).hidden_states
            out["vision.selected"] = hidden[-2][:, 1:]
            require(
                torch.equal(hidden[0], out["vision.pre_norm"]),
                "hidden_states[0] is not the pre-norm output.",
            )
            require(
                torch.equal(out["vision.selected"], out["projector_in"]),
                "the projector got other features.",
            )
        return out


def record_llava_case(
    golden: Golden,
    run: LlavaRun,
    kind: str,
    prompt: str,
    images: list[tuple[str, np.ndarray]],
    result: Greedy,
    *,
    messages: list[dict[str, Any]] | None = None,
    repetition_penalty: float = 1.0,
    same_inputs_as: str | None = None,
    vision: bool = True,
    decoder: bool = True,
    wanted: frozenset[str] | None = None,
) -> str:
    """Records one case and returns its prefix.

    same_inputs_as: the case that holds the inputs and prefill of this one; only generation is kept.
    vision: keep the image and vision taps (else the manifest only names the image files).
    decoder: keep the decoder's hidden states.
    wanted: keep only these taps.
    """
    case = f"case{len(golden.manifest['cases'])}"
    inputs = run.inputs(prompt, [image for _, image in images])
    length = inputs["input_ids"].shape[1]
    tokenizer = run.processor.tokenizer
    text = tokenizer.decode(result.ids, skip_special_tokens=True)
    text_special = tokenizer.decode(result.ids, skip_special_tokens=False)
    entry = {
        "name": case,
        "kind": kind,
        "prompt": prompt,
        "messages": messages,
        "images": [name for name, _ in images],
        "image_sizes": [[int(image.shape[0]), int(image.shape[1])] for _, image in images],
        "prompt_tokens": length,
        "image_tokens": int((inputs["input_ids"] == run.model.config.image_token_id).sum()),
        "max_new_tokens": GREEDY_STEPS,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": [run.eos_id],
        "stopped_by_eos": result.ids[-1] == run.eos_id,
        "text_out": text,
        "text_out_special": text_special,
        "min_gap": round(result.min_gap, 6),
    }
    if same_inputs_as:
        entry["same_inputs_as"] = same_inputs_as
    golden.manifest["cases"].append(entry)

    golden.add(f"{case}.prompt", utf8(prompt))
    golden.add(f"{case}.text_out", utf8(text))
    golden.add(f"{case}.text_out_special", utf8(text_special))
    golden.add(f"{case}.greedy_ids", torch.tensor(result.ids))
    golden.add(f"{case}.greedy_logits", result.logits[:GREEDY_LOGIT_STEPS])
    if repetition_penalty != 1.0:
        golden.add(f"{case}.greedy_scores", result.scores[:GREEDY_LOGIT_STEPS])
    golden.add(f"{case}.input_ids", inputs["input_ids"][0])
    if same_inputs_as:
        return case

    taps = run.taps(inputs)
    sigma = float(taps["logits_prefill"].float().std())
    require(
        1.0 <= sigma <= 6.0,
        f"{golden.folder.name} {case} has a logit deviation of {sigma:.2f}, outside 1 to 6.",
    )
    gate = 1e-4 if run.model.device.type == "cpu" else 1e-3  # a GPU multiplies one row otherwise
    require(
        bool((taps["logits_prefill"][-1].float() - result.logits[0]).abs().max() < gate),
        f"{golden.folder.name} {case} differs between the prefill and the first greedy step.",
    )
    entry["logit_sigma"] = round(sigma, 4)
    golden.add(f"{case}.attention_mask", inputs["attention_mask"][0])
    if images and vision:
        golden.add(f"{case}.image_sizes", torch.tensor(entry["image_sizes"]))
        for k, (_, image) in enumerate(images):
            pil = run.resized(image, "pil").numpy()
            require(
                np.array_equal(
                    pil, run.resized_by_axis(image, *pil.shape[:2], horizontal_first=True)
                ),
                f"Pillow did not resize image {k} of {case} horizontally first; change its size.",
            )
            golden.add(f"{case}.image_u8.{k}", image)
            for backend in ("pil", "torchvision"):
                golden.add(f"{case}.resized_u8.{backend}.{k}", run.resized(image, backend))
        pil_inputs = run.inputs(prompt, [image for _, image in images], "pil")
        golden.add(f"{case}.pixel_values.torchvision", inputs["pixel_values"])
        golden.add(f"{case}.pixel_values.pil", pil_inputs["pixel_values"])
        pil_logits = run.taps(pil_inputs)["logits_prefill"][-1]
        golden.add(f"{case}.logits_last_pil", pil_logits)
    for name, tensor in taps.items():
        if wanted is not None and name not in wanted:
            continue
        is_vision = name.startswith("vision.") or name.startswith("projector")
        if name in ("logits_prefill", "position_ids") or (vision if is_vision else decoder):
            golden.add(f"{case}.{name}", tensor)
    return case


def llava_cases(golden: Golden, run: LlavaRun, seed: int) -> None:
    """The seven cases and the batch of a full LLaVA-1.5 folder."""

    def user(text: str, image: bool = False) -> dict[str, Any]:
        content = [{"type": "image"}] if image else []
        return {"role": "user", "content": [*content, {"type": "text", "text": text}]}

    def same_with_pil(prompt: str, images: list[np.ndarray], result: Greedy) -> bool:
        other = greedy(run.model, run.inputs(prompt, images, "pil"))
        return other.ids == result.ids and other.min_gap > MIN_GAP

    # One image, plain and with a repetition penalty; the penalty must change the outcome.
    messages = [user("what is in the scene?", image=True)]
    one_prompt = run.chat(messages)
    require(
        one_prompt == "USER: <image>\nwhat is in the scene? ASSISTANT:",
        f"the chat template rendered {one_prompt!r}.",
    )

    def try_one(noise: int) -> tuple[np.ndarray, Greedy, Greedy] | None:
        image = synthetic_image(101, 75, noise)
        inputs = run.inputs(one_prompt, [image])
        plain = greedy(run.model, inputs)
        if not usable(plain):
            return None
        penalised = greedy(run.model, inputs, repetition_penalty=1.05)
        if (
            not usable(penalised)
            or penalised.ids == plain.ids
            or not same_with_pil(one_prompt, [image], plain)
        ):
            return None
        return image, plain, penalised

    _, (image0, plain, penalised) = first_usable(
        "one image", range(seed * 1000, seed * 1000 + 400), try_one
    )
    other = run.taps(run.inputs(one_prompt, [synthetic_image(101, 75, seed)]))["logits_prefill"][-1]
    require(
        bool((other - plain.logits[0]).abs().max() > 0.2), "the image hardly changes the logits."
    )
    uncached = greedy(run.model, run.inputs(one_prompt, [image0]), use_cache=False)
    require(uncached.ids == plain.ids, "generation with and without a cache differ.")
    pictures = {"image0.png": image0}
    case0 = record_llava_case(
        golden, run, "one_image", one_prompt, [("image0.png", image0)], plain, messages=messages
    )

    # Two images of different odd sizes, one enlarged and one shrunk, with text between them.
    two_prompt = (
        "USER: <image>\nthis is the red one <image>\nand this is the other, is it small? ASSISTANT:"
    )

    def try_two(noise: int) -> tuple[list[np.ndarray], Greedy] | None:
        images = [synthetic_image(37, 41, noise), synthetic_image(131, 59, noise + 1)]
        result = greedy(run.model, run.inputs(two_prompt, images))
        return (
            (images, result)
            if usable(result) and same_with_pil(two_prompt, images, result)
            else None
        )

    _, (two, result) = first_usable("two images", range(seed * 2000, seed * 2000 + 400, 2), try_two)
    pictures |= {"image1.png": two[0], "image2.png": two[1]}
    named = [("image1.png", two[0]), ("image2.png", two[1])]
    record_llava_case(golden, run, "two_images", two_prompt, named, result)

    # Text only.
    def try_text(number: int) -> tuple[str, list[dict[str, Any]], Greedy] | None:
        turn = [user(f"tell me {number} colours in the scene")]
        answer = greedy(run.model, run.inputs(run.chat(turn), []))
        return (run.chat(turn), turn, answer) if usable(answer) else None

    _, (text_prompt, messages, text_result) = first_usable("text only", range(2, 200), try_text)
    case2 = record_llava_case(
        golden, run, "text_only", text_prompt, [], text_result, messages=messages
    )

    record_llava_case(
        golden,
        run,
        "repetition_penalty",
        one_prompt,
        [("image0.png", image0)],
        penalised,
        messages=[user("what is in the scene?", image=True)],
        repetition_penalty=1.05,
        same_inputs_as=case0,
    )

    # Characters that need byte fallback, newlines, runs of spaces and a literal special token.
    def try_special(number: int) -> tuple[str, list[dict[str, Any]], Greedy] | None:
        turn = [user(f"naïve café #{number}\n\n  生活 😊\tis\u00a0it <s>the \u2581red one?\r\n")]
        answer = greedy(run.model, run.inputs(run.chat(turn), []))
        return (run.chat(turn), turn, answer) if usable(answer) else None

    _, (prompt, messages, result) = first_usable("special characters", range(200), try_special)
    record_llava_case(golden, run, "special_characters", prompt, [], result, messages=messages)

    # The model itself produces eos.
    def try_eos(number: int) -> tuple[str, list[dict[str, Any]], Greedy] | None:
        turn = [user(f"is it small? {number}")]
        answer = greedy(run.model, run.inputs(run.chat(turn), []))
        return (run.chat(turn), turn, answer) if usable(answer, want_eos=True) else None

    _, (prompt, messages, result) = first_usable("a natural end", range(3000), try_eos)
    record_llava_case(golden, run, "eos", prompt, [], result, messages=messages, decoder=False)

    # Two turns after an image.
    def try_chat(number: int) -> tuple[str, list[dict[str, Any]], Greedy] | None:
        turns = [
            user("what is the colour of the circle?", image=True),
            {"role": "assistant", "content": [{"type": "text", "text": "The circle is red."}]},
            user(f"and {number} others?"),
        ]
        answer = greedy(run.model, run.inputs(run.chat(turns), [image0]))
        if not usable(answer) or not same_with_pil(run.chat(turns), [image0], answer):
            return None
        return run.chat(turns), turns, answer

    _, (prompt, messages, result) = first_usable("two turns", range(200), try_chat)
    record_llava_case(
        golden,
        run,
        "two_turns",
        prompt,
        [("image0.png", image0)],
        result,
        messages=messages,
        vision=False,
    )

    # A batch is the cases generated alone; the reference with left padding must agree.
    batch = run.processor(
        images=[PIL.Image.fromarray(image0)],
        text=[one_prompt, text_prompt],
        padding=True,
        return_tensors="pt",
    )
    reset_rope(run.model)
    together = run.model.generate(**batch, max_new_tokens=GREEDY_STEPS, do_sample=False)
    width = batch["input_ids"].shape[1]
    for row, alone in enumerate((plain, text_result)):
        require(
            together[row, width:].tolist() == alone.ids,
            f"row {row} of the left-padded batch differs from the sequence alone.",
        )
    golden.manifest["batches"] = [{"name": "batch0", "cases": [case0, case2]}]

    for name, image in pictures.items():
        PIL.Image.fromarray(image).save(golden.folder / name)


def record_tall_resize(golden: Golden, run: LlavaRun, seed: int) -> None:
    """Records one tall image resized in both orders of the two passes.

    Pillow 13 resizes vertically first when that removes more than twice as many rows as columns go
    away; older versions go horizontally first. The library's answer must be one of the two.
    """
    tall = synthetic_image(59, 131, seed)
    golden.add("resize0.image_u8", tall)
    golden.add(
        "resize0.horizontal_first", run.resized_by_axis(tall, 124, 56, horizontal_first=True)
    )
    golden.add("resize0.vertical_first", run.resized_by_axis(tall, 124, 56, horizontal_first=False))
    golden.add("resize0.torchvision", run.resized(tall, "torchvision"))
    require(
        torch.equal(run.resized(tall, "pil"), golden.tensors["resize0.vertical_first"]),
        "Pillow did not resize a tall image vertically first, as version 13.0.0 does.",
    )


def rope_cases(golden: Golden, run: LlavaRun, seed: int, max_pos: int) -> None:
    """Records an image prompt and a text prompt of a RoPE variant: inputs, logits and ids only."""
    question = "what is in the scene, and is the small circle red or not?"
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    ]
    image_prompt = run.chat(messages)

    def try_image(noise: int) -> tuple[np.ndarray, Greedy] | None:
        image = synthetic_image(61, 83, noise)
        result = greedy(run.model, run.inputs(image_prompt, [image]))
        other = greedy(run.model, run.inputs(image_prompt, [image], "pil"))
        return (
            (image, result)
            if usable(result) and usable(other) and other.ids == result.ids
            else None
        )

    _, (image, result) = first_usable("one image", range(seed * 1000, seed * 1000 + 400), try_image)
    PIL.Image.fromarray(image).save(golden.folder / "image0.png")
    named = [("image0.png", image)]
    record_llava_case(
        golden,
        run,
        "one_image",
        image_prompt,
        named,
        result,
        messages=messages,
        vision=False,
        decoder=False,
    )

    def try_text(number: int) -> tuple[list[dict[str, Any]], Greedy] | None:
        turn = [
            {"role": "user", "content": [{"type": "text", "text": f"the scene {number} is red"}]}
        ]
        result = greedy(run.model, run.inputs(run.chat(turn), []))
        return (turn, result) if usable(result) else None

    _, (turn, result) = first_usable("text only", range(200), try_text)
    record_llava_case(
        golden, run, "text_only", run.chat(turn), [], result, messages=turn, decoder=False
    )
    lengths = [case["prompt_tokens"] for case in golden.manifest["cases"]]
    if max_pos < 512:  # the first prompt is past the limit, the second crosses it while generating
        require(
            lengths[0] > max_pos and lengths[1] < max_pos < lengths[1] + GREEDY_STEPS,
            f"the prompts of {lengths} tokens do not straddle max_position_embeddings {max_pos}.",
        )


def save_llava(folder: Path, spec: LlavaSpec, model: LlavaForConditionalGeneration) -> None:
    """Writes weights, configuration, tokenizer and processor of one checkpoint."""
    original = not spec.old_layout
    model.save_pretrained(folder, save_original_format=original, max_shard_size="4GB")
    model_proto = train_sentencepiece()
    write_llava_processor(
        folder,
        spec,
        llama_tokenizer(model_proto, spec.legacy_tokenizer, spec.shape.image_id),
        model_proto,
    )
    if spec.old_layout:
        old_layout(folder, spec)


def llava_names(folder: Path, model: LlavaForConditionalGeneration) -> None:
    """Writes names.json: per spelling, a map from canonical names to its own."""
    with tempfile.TemporaryDirectory() as temporary:
        canonical_path, old_path = Path(temporary) / "canonical", Path(temporary) / "old"
        model.save_pretrained(canonical_path, save_original_format=False)
        canonical = safetensors.torch.load_file(canonical_path / "model.safetensors")
        saved = safetensors.torch.load_file(folder / "model.safetensors")
        by_bytes = {t.numpy().tobytes(): name for name, t in saved.items()}
        require(
            len(by_bytes) == len(canonical) == len(saved),
            "two tensors are equal, so names cannot be matched.",
        )
        spellings = {
            "saved": {name: by_bytes[t.numpy().tobytes()] for name, t in canonical.items()},
            "canonical": {name: name for name in canonical},
            "v451": {name: rename_llava(name, "v451") for name in canonical},
            "original": {name: rename_llava(name, "original") for name in canonical},
        }
        # The library itself must accept the old spelling and see the same weights.
        shutil.copytree(canonical_path, old_path)
        old = {spellings["v451"][name]: t for name, t in canonical.items()}
        safetensors.torch.save_file(old, old_path / "model.safetensors", metadata={"format": "pt"})
        reloaded = LlavaForConditionalGeneration.from_pretrained(
            old_path, dtype=torch.float32
        ).state_dict()
        for name, tensor in model.state_dict().items():
            require(
                torch.equal(reloaded[name], tensor),
                f"the old spelling of {name} does not load the same values.",
            )
    for spelling, names in spellings.items():
        require(
            len(set(names.values())) == len(names),
            f"the spelling {spelling} maps two tensors to one name.",
        )
    ordered = {spelling: dict(sorted(names.items())) for spelling, names in spellings.items()}
    (folder / "names.json").write_text(
        json_text({"model_file_spelling": "saved", "spellings": ordered})
    )


LLAVA_MHA = LlavaSpec(
    "llava_mha",
    "LLaVA-1.5, 4 key/value heads, tokenizer.json and tokenizer.model",
    11,
    sentencepiece_file=True,
)
LLAVA_GQA = LlavaSpec(
    "llava_gqa", "LLaVA-1.5, 2 key/value heads, names.json", 12, text={"num_key_value_heads": 2}
)
LLAVA_ROPE = [
    LlavaSpec(
        "llava_rope_llama3",
        "LLaVA-1.5, llama3 RoPE, head_dim 16 (not hidden/heads), Metaspace tokenizer, "
        "template with whitespace control",
        13,
        text={
            "head_dim": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        legacy_tokenizer=False,
        template=LLAVA_TEMPLATE_SPREAD,
    ),
    LlavaSpec(
        "llava_rope_linear",
        "LLaVA-1.5, linear RoPE, every file as a checkpoint of 2024 has it",
        14,
        text={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
        old_layout=True,
    ),
    LlavaSpec(
        "llava_rope_dynamic",
        "LLaVA-1.5, dynamic RoPE past max_position_embeddings 48",
        15,
        text={
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
]


def llava_full(root: Path, spec: LlavaSpec) -> None:
    """A LLaVA-1.5 folder with every case."""
    folder = root / spec.name
    model = llava_model(spec)
    save_llava(folder, spec, model)
    if spec is LLAVA_GQA:
        llava_names(folder, model)
    run = LlavaRun(folder)
    golden = Golden(folder, spec.description, spec.seed)
    llava_cases(golden, run, spec.seed)
    if spec is LLAVA_MHA:
        record_tall_resize(golden, run, spec.seed)
    record_tokenizer(golden, run)
    golden.write()


def llava_rope(root: Path, spec: LlavaSpec) -> None:
    """A LLaVA-1.5 folder with a RoPE variant: inputs, logits and ids."""
    folder = root / spec.name
    save_llava(folder, spec, llava_model(spec))
    run = LlavaRun(folder)
    golden = Golden(folder, spec.description, spec.seed)
    rope_cases(golden, run, spec.seed, run.model.config.text_config.max_position_embeddings)
    record_tokenizer(golden, run)
    golden.write()


def llava_sharded(root: Path) -> None:
    """llava_gqa in several shards with an index; the goldens are those of llava_gqa."""
    spec = dataclasses.replace(
        LLAVA_GQA, name="llava_gqa_sharded", description="llava_gqa in shards with an index"
    )
    folder = root / spec.name
    model = llava_model(LLAVA_GQA)
    save_llava(folder, spec, model)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="120KB")
    require(
        len(list(folder.glob("model-*.safetensors"))) >= 3,
        "the sharded checkpoint has fewer than three shards.",
    )
    loaded = LlavaRun(folder).model.state_dict()
    for name, tensor in model.state_dict().items():
        require(torch.equal(loaded[name], tensor), f"{name} changed while it was sharded.")
    golden = Golden(folder, spec.description, spec.seed)
    golden.manifest["goldens_of"] = LLAVA_GQA.name
    golden.write()


def llava_half(root: Path, spec: LlavaSpec, dtype: torch.dtype, device: str = "cpu") -> None:
    """A checkpoint with weights rounded to a half type.

    The taps are recorded in fp32 arithmetic on the rounded weights and, with prefix half., in the
    half type itself, along with the logits of both while the fp32 greedy tokens are fed
    (forced_logits).
    """
    folder = root / spec.name
    shape = spec.shape
    save_llava(folder, spec, llava_model(spec, device).to(dtype))
    run, half = LlavaRun(folder, device=device), LlavaRun(folder, dtype, device)
    golden = Golden(folder, spec.description, spec.seed)
    image_prompt = "USER: <image>\nwhat is in the scene? ASSISTANT:"

    def try_image(noise: int) -> tuple[np.ndarray, Greedy] | None:
        image = synthetic_image(*shape.picture, noise)
        result = greedy(run.model, run.inputs(image_prompt, [image]))
        other = greedy(run.model, run.inputs(image_prompt, [image], "pil"))
        return (
            (image, result)
            if usable(result) and usable(other) and other.ids == result.ids
            else None
        )

    first = spec.seed * 1000
    _, (image, result) = first_usable("one image", range(first, first + 400), try_image)
    PIL.Image.fromarray(image).save(folder / "image0.png")

    def try_text(number: int) -> tuple[str, Greedy] | None:
        prompt = f"USER: tell me {number} colours in the scene ASSISTANT:"
        answer = greedy(run.model, run.inputs(prompt, []))
        return (prompt, answer) if usable(answer) else None

    _, (text_prompt, text_result) = first_usable("text only", range(200), try_text)
    for kind, prompt, images, answer in (
        ("one_image", image_prompt, [("image0.png", image)], result),
        ("text_only", text_prompt, [], text_result),
    ):
        case = record_llava_case(golden, run, kind, prompt, images, answer, wanted=shape.taps)
        pixels = [picture for _, picture in images]
        for prefix, which in (("", run), ("half.", half)):
            inputs = which.inputs(prompt, pixels)
            length = inputs["input_ids"].shape[1]
            if prefix:
                for tap, tensor in which.taps(inputs).items():
                    if tensor.is_floating_point() and (shape.taps is None or tap in shape.taps):
                        golden.add(f"{case}.{prefix}{tap}", tensor)
            answered = torch.tensor([answer.ids[:-1]], device=device)
            forced = torch.cat([inputs["input_ids"], answered], dim=1)
            inputs |= {"input_ids": forced, "attention_mask": torch.ones_like(forced)}
            logits = which.taps({k: v for k, v in inputs.items() if k != "token_type_ids"})[
                "logits_prefill"
            ]
            golden.add(f"{case}.{prefix}forced_logits", logits[length - 1 :])
        describe_difference(golden, case)
    golden.write()


def folders() -> dict[str, Callable[[Path], None]]:
    """The folders of the LLaVA-1.5 family: name -> function that writes it below a root."""
    writers: dict[str, Callable[[Path], None]] = {
        spec.name: (lambda root, spec=spec: llava_full(root, spec))
        for spec in (LLAVA_MHA, LLAVA_GQA)
    }
    writers |= {spec.name: (lambda root, spec=spec: llava_rope(root, spec)) for spec in LLAVA_ROPE}
    writers["llava_gqa_sharded"] = llava_sharded
    for suffix, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        spec = dataclasses.replace(
            LLAVA_GQA,
            name=f"llava_gqa_{suffix}",
            description=f"llava_gqa with weights rounded to {suffix}",
        )
        writers[spec.name] = lambda root, spec=spec, dtype=dtype: llava_half(root, spec, dtype)
    return writers

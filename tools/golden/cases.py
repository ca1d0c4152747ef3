"""Running a saved checkpoint of any family and recording its cases.

A family describes what it makes (a model, a processor, requests) and which modules of its tower are
tapped; the prefill, the greedy run, the checks and the tensor names are the same for all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import safetensors.torch
import torch
import transformers
from common import (
    GREEDY_LOGIT_STEPS,
    GREEDY_STEPS,
    MIN_GAP,
    Golden,
    Greedy,
    first_usable,
    greedy,
    json_text,
    record_tokenizer,
    require,
    reset_rope,
    synthetic_image,
    usable,
    utf8,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata

# ---------------------------------------------------------------- tokenizer

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What the tiny byte-level vocabularies are trained on: the words of the prompts and of the answers.
BYTE_LEVEL_CORPUS = [
    "what is in the scene? is the small circle red or not? how are they different?",
    "You are a helpful assistant.",
    "system\nYou are a helpful assistant.\nuser\nassistant\n",
    "Frame1: Frame2: Picture 1: Picture 2: Video 1: <1.0 seconds><2.5 seconds>",
    "tell me the colours in the scene and this is the other, then describe the video",
]


def byte_level_tokenizer(
    size: int, specials: list[str], plain: Iterable[str] = (), words: int = 0, **options: Any
) -> PreTrainedTokenizerFast:
    """A Qwen2 pipeline (NFC, its split, byte-level BPE) of `size` entries, then added tokens.

    specials: added tokens that decoding may skip; plain: added tokens that it may not; words:
    entries before them that no text becomes; options: of the tokenizer's class.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        BYTE_LEVEL_CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    require(
        tokenizer.get_vocab_size() == size,
        f"the corpus gives {tokenizer.get_vocab_size()} of {size} byte-level entries.",
    )
    if words:
        described = json.loads(tokenizer.to_str())
        described["model"]["vocab"] |= {f"word{i}": i for i in range(size, size + words)}
        tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **options,
    )


# ---------------------------------------------------------------- requests


@dataclasses.dataclass
class Video:
    """Frames of one size, and how many of them a second has."""

    folder: str  # of the frames, frame00.png upward, below the checkpoint
    frames: np.ndarray  # (frames, height, width, 3) u8
    fps: float | None


@dataclasses.dataclass
class Request:
    """One prompt with its pictures and clips, in the order of their placeholders."""

    messages: list[dict[str, Any]]
    images: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)
    videos: list[Video] = dataclasses.field(default_factory=list)
    template: dict[str, Any] = dataclasses.field(default_factory=dict)  # more template variables
    prompt: str | None = None  # instead of what the template renders


def metadata_of(video: Video) -> VideoMetadata:
    """What is known of a clip besides its frames."""
    count = len(video.frames)
    return VideoMetadata(total_num_frames=count, fps=video.fps, frames_indices=list(range(count)))


def turn(*items: str, role: str = "user") -> dict[str, Any]:
    """A message; the items "<image>" and "<video>" stand for a picture and a clip."""
    kinds = {"<image>": "image", "<video>": "video"}
    return {
        "role": role,
        "content": [
            {"type": kinds[item]} if item in kinds else {"type": "text", "text": item}
            for item in items
        ],
    }


def synthetic_clip(width: int, height: int, frames: int, seed: int) -> np.ndarray:
    """A square that moves over a still picture: (frames, height, width, 3) u8."""
    still = synthetic_image(width, height, seed)
    side = max(3, min(width, height) // 3)
    clip = np.stack([still] * frames)
    for k in range(frames):
        x = (width - side) * k // max(frames - 1, 1)
        y = (height - side) * ((k + seed) % 3) // 2
        clip[k, y : y + side, x : x + side] = (250 - 40 * (k % 3), 30 * k % 256, 20)
    return clip


# ---------------------------------------------------------------- running


@dataclasses.dataclass
class Tap:
    """A module whose output is recorded, and how it is reshaped."""

    module: torch.nn.Module
    name: str
    shape: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    before: bool = False  # the module's input instead of its output


class Run:
    """A saved checkpoint loaded back, with what is needed to record its cases."""

    backend = "torchvision"  # whose pixels are recorded

    def __init__(
        self,
        folder: Path,
        model_class: type,
        taps: Callable[[Any], list[Tap]],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.folder = folder
        self.model, report = model_class.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            device_map=None if device == "cpu" else device,
        )
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            require(not report[what], f"{folder.name} has {what} {sorted(report[what])}.")
        self.model.eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        name = type(self.processor.image_processor).__name__
        pil = getattr(transformers, name.removesuffix("Fast") + "Pil")
        self.image_processors = {
            "torchvision": self.processor.image_processor,
            "pil": pil.from_pretrained(folder),
        }
        self.module_taps = taps(self.model.model)
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = eos if isinstance(eos, list) else [eos]

    def prompt(self, request: Request) -> str:
        """The prompt before its placeholders are expanded."""
        if request.prompt is not None:
            return request.prompt
        return self.processor.apply_chat_template(
            request.messages, add_generation_prompt=True, tokenize=False, **request.template
        )

    def inputs(self, request: Request, backend: str | None = None) -> dict[str, Any]:
        """The processor's output, with pictures by the named backend (default: the run's)."""
        arguments: dict[str, Any] = {}
        prompt, bos = self.prompt(request), self.processor.tokenizer.bos_token
        if bos and prompt.startswith(bos):  # the library adds no second one
            arguments["add_special_tokens"] = False
        if request.images:
            arguments["images"] = self.pictures(request)
        if request.videos:
            arguments["videos"] = [video.frames for video in request.videos]
            arguments["video_metadata"] = [metadata_of(video) for video in request.videos]
        self.processor.image_processor = self.image_processors[backend or self.backend]
        try:
            inputs = dict(self.processor(text=[prompt], return_tensors="pt", **arguments))
        finally:
            self.processor.image_processor = self.image_processors[self.backend]
        inputs.pop("video_metadata", None)
        inputs.pop("token_type_ids", None)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                pixels = name.startswith("pixel_values")
                inputs[name] = value.to(
                    self.model.device, self.model.dtype if pixels else value.dtype
                )
        return inputs

    def taken(self, video: Video) -> list[int]:
        """The frames that the processor takes: all, unless its file lets it sample."""
        processor = self.processor.video_processor
        if not processor.do_sample_frames:
            return list(range(len(video.frames)))
        indices = processor.sample_frames(
            metadata_of(video), num_frames=processor.num_frames, fps=processor.fps
        )
        return [int(i) for i in indices]

    def pictures(self, request: Request) -> Any:
        """The pictures in the form that the processor takes."""
        return [PIL.Image.fromarray(image) for _, image in request.images]

    def greedy(self, inputs: dict[str, Any], **options: Any) -> Greedy:
        """The reference's greedy generation from a fresh state."""
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        return greedy(self.model, inputs, **options)

    def taps(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Runs one prefill with hooks and returns the activation at every tap.

        The tower runs once for the pictures and once for the clips; taps of the second run are
        called video.<name>.
        """
        model, decoder = self.model.model, self.model.model.language_model
        runs = [""] * ("pixel_values" in inputs) + ["video."] * ("pixel_values_videos" in inputs)
        kept: dict[str, list[torch.Tensor]] = {}
        out: dict[str, torch.Tensor] = {}
        handles = []

        def keep(tap: Tap) -> None:
            def hook(_module: torch.nn.Module, args: Any, result: Any = None) -> None:
                value = args if tap.before else result
                value = value[0] if isinstance(value, tuple) else value
                kept.setdefault(tap.name, []).append(tap.shape(value))

            register = tap.module.register_forward_pre_hook
            handles.append((register if tap.before else tap.module.register_forward_hook)(hook))

        for tap in self.module_taps:
            keep(tap)
        for k, layer in enumerate(decoder.layers):
            keep(Tap(layer, f"llm.layer.{k}", lambda t: t[0]))
        keep(Tap(decoder.norm, "llm.norm", lambda t: t[0]))

        def decoder_input(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            out["inputs_embeds"] = kwargs["inputs_embeds"][0]

        def rotary_input(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            out["position_ids"] = positions[:, 0] if positions.dim() == 3 else positions

        reset_rope(self.model)
        if hasattr(model, "rope_deltas"):
            model.rope_deltas = None
        handles.append(decoder.register_forward_pre_hook(decoder_input, with_kwargs=True))
        handles.append(decoder.rotary_emb.register_forward_pre_hook(rotary_input, with_kwargs=True))
        try:
            with torch.no_grad():
                result = self.model(**inputs, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        for name, values in kept.items():
            if name.startswith("llm."):
                out[name] = values[0]
                continue
            require(len(values) == len(runs), f"the tap {name} was passed {len(values)} times.")
            for prefix, value in zip(runs, values, strict=True):
                out[prefix + name] = value
        if getattr(model, "rope_deltas", None) is not None:
            out["rope_delta"] = model.rope_deltas.flatten()
        out["logits_prefill"] = result.logits[0]
        return out


# ---------------------------------------------------------------- recording

# Outputs of the processor that are recorded as they are, without the axis of the batch.
KEPT_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "num_patches")


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which tensors of a case are kept besides ids, positions and the greedy run."""

    vision: bool = True  # taps of the tower, and the pixels as bytes
    decoder: bool = True  # the decoder's hidden states
    logits: bool = True  # of every row of the prompt; greedy_logits has those of the last
    pixels: bool = False  # normalised pixels, and the tower from the patches on


IDS_ONLY = Keep(vision=False, decoder=False, logits=False)


def attempt(run: Run, request: Request, **options: Any) -> Greedy | None:
    """The greedy answer if it is fit to be a golden and the same with both picture backends."""
    want_eos = options.pop("want_eos", False)
    result = run.greedy(run.inputs(request), **options)
    if not fit(run, result, want_eos=want_eos):
        return None
    if request.images:
        name = "pil" if run.backend == "torchvision" else "torchvision"
        other = run.greedy(run.inputs(request, name), **options)
        if other.ids != result.ids or other.min_gap <= MIN_GAP:
            return None
    return result


def fit(run: Run, result: Greedy, *, want_eos: bool = False) -> bool:
    """usable() for a family with several eos ids."""
    if want_eos:
        ended = result.ids[-1] in run.eos_ids and 4 <= len(result.ids) < GREEDY_STEPS
        return result.min_gap > MIN_GAP and ended
    return usable(result, eos_id=run.eos_ids[0]) and not set(result.ids) & set(run.eos_ids)


def search(
    run: Run,
    what: str,
    seed: int,
    make: Callable[[int], Request],
    accept: Callable[[Request, Greedy], bool] | None = None,
    **options: Any,
) -> tuple[Request, Greedy]:
    """The first request made from a number at or after `seed` whose answer is fit and accepted."""

    def try_one(number: int) -> tuple[Request, Greedy] | None:
        request = make(number)
        result = attempt(run, request, **options)
        if result is None or (accept is not None and not accept(request, result)):
            return None
        return request, result

    return first_usable(what, range(seed, seed + 400), try_one)[1]


def write_inputs(folder: Path, request: Request) -> None:
    """Writes the pictures and the frames of a request as PNG files."""
    for name, image in request.images:
        PIL.Image.fromarray(image).save(folder / name)
    for video in request.videos:
        (folder / video.folder).mkdir(exist_ok=True)
        for k, frame in enumerate(video.frames):
            PIL.Image.fromarray(frame).save(folder / video.folder / f"frame{k:02}.png")


def describe_videos(run: Run, request: Request) -> list[dict[str, Any]]:
    """The manifest's list of clips, with the frames that the processor took."""
    return [
        {
            "folder": video.folder,
            "frames": len(video.frames),
            "size": [int(n) for n in video.frames.shape[1:3]],
            "fps": video.fps,
            "taken": run.taken(video),
        }
        for video in request.videos
    ]


EARLY_TAPS = ("patch_embed", "embeddings", "pre_norm")


def drop_blocks(taps: dict[str, torch.Tensor], keep: Keep) -> None:
    """Names the last block vision.selected where no family has, and drops what is not kept."""
    for prefix in ("", "video."):
        blocks = [name for name in taps if name.startswith(f"{prefix}vision.layer.")]
        if blocks:
            taps.setdefault(f"{prefix}vision.selected", taps[blocks[-1]])
        if not keep.pixels:
            for name in [*blocks, *(f"{prefix}vision.{tap}" for tap in EARLY_TAPS)]:
                taps.pop(name, None)


def record(
    golden: Golden,
    run: Run,
    kind: str,
    request: Request,
    result: Greedy,
    keep: Keep,
    *,
    repetition_penalty: float = 1.0,
    same_inputs_as: str | None = None,
    extra: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] | None = None,
) -> str:
    """Records one case and returns its prefix.

    same_inputs_as: the case that holds the inputs and prefill of this one; only generation is kept.
    extra: adds or removes taps, from the processor's output and the taps.
    """
    case = f"case{len(golden.manifest['cases'])}"
    inputs = run.inputs(request)
    videos = describe_videos(run, request)
    config, tokenizer = run.model.config, run.processor.tokenizer
    ids = inputs["input_ids"][0]
    text = tokenizer.decode(result.ids, skip_special_tokens=True)
    text_special = tokenizer.decode(result.ids, skip_special_tokens=False)
    video_id = getattr(config, "video_token_id", None)
    entry = {
        "name": case,
        "kind": kind,
        "prompt": run.prompt(request),
        "messages": request.messages if request.prompt is None else None,
        "images": [name for name, _ in request.images],
        "image_sizes": [[int(n) for n in image.shape[:2]] for _, image in request.images],
        "videos": videos,
        "prompt_tokens": len(ids),
        "image_tokens": int((ids == config.image_token_id).sum()),
        "video_tokens": int((ids == video_id).sum()) if video_id is not None else 0,
        "max_new_tokens": GREEDY_STEPS,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": run.eos_ids,
        "stopped_by_eos": result.ids[-1] in run.eos_ids,
        "text_out": text,
        "text_out_special": text_special,
        "min_gap": round(result.min_gap, 6),
    }
    if request.template:
        entry["template"] = request.template
    if same_inputs_as:
        entry["same_inputs_as"] = same_inputs_as
    golden.manifest["cases"].append(entry)
    golden.add(f"{case}.prompt", utf8(entry["prompt"]))
    golden.add(f"{case}.text_out", utf8(text))
    golden.add(f"{case}.text_out_special", utf8(text_special))
    golden.add(f"{case}.greedy_ids", torch.tensor(result.ids))
    golden.add(f"{case}.greedy_logits", result.logits[:GREEDY_LOGIT_STEPS])
    if repetition_penalty != 1.0:
        golden.add(f"{case}.greedy_scores", result.scores[:GREEDY_LOGIT_STEPS])
    golden.add(f"{case}.input_ids", ids)
    if same_inputs_as:
        return case

    taps = run.taps(inputs)
    sigma = float(taps["logits_prefill"].std())
    require(
        1.0 <= sigma <= 6.0,
        f"{golden.folder.name} {case} has a logit deviation of {sigma:.2f}, outside 1 to 6.",
    )
    gate = 1e-4 if run.model.device.type == "cpu" else 1e-3  # a GPU multiplies one row otherwise
    require(
        bool((taps["logits_prefill"][-1] - result.logits[0]).abs().max() < gate),
        f"{golden.folder.name} {case} differs between the prefill and the first greedy step.",
    )
    entry["logit_sigma"] = round(sigma, 4)
    golden.add(f"{case}.attention_mask", inputs["attention_mask"][0])
    for name in KEPT_INPUTS:
        if name in inputs:
            golden.add(f"{case}.{name}", torch.as_tensor(inputs[name]))
    if request.images:
        golden.add(f"{case}.image_sizes", torch.tensor(entry["image_sizes"]))
    if extra is not None:
        extra(inputs, taps)
    drop_blocks(taps, keep)
    if keep.pixels:
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                golden.add(f"{case}.{name}.{run.backend}", inputs[name])
    for name, tensor in taps.items():
        bare = name.removeprefix("video.")
        is_vision = bare.startswith(("vision.", "projector", "packed_features", "deepstack"))
        if name == "logits_prefill":
            wanted = keep.logits
        elif name in ("position_ids", "rope_delta"):
            wanted = True
        else:
            wanted = keep.vision if is_vision else keep.decoder
        if wanted:
            golden.add(f"{case}.{name}", tensor)
    write_inputs(golden.folder, request)
    return case


def check_uncached(run: Run, request: Request, result: Greedy) -> None:
    """Generation without a cache must give the same tokens."""
    other = run.greedy(run.inputs(request), use_cache=False)
    require(other.ids == result.ids, "generation with and without a cache differ.")


def check_pictures_matter(run: Run, request: Request, result: Greedy) -> None:
    """Other pixels must change the first logits."""
    other = dataclasses.replace(
        request,
        images=[(name, 255 - image) for name, image in request.images],
        videos=[dataclasses.replace(v, frames=255 - v.frames) for v in request.videos],
    )
    logits = run.taps(run.inputs(other))["logits_prefill"][-1]
    require(
        bool((logits - result.logits[0]).abs().max() > 0.1),
        "the pictures hardly change the logits.",
    )


def write_names(folder: Path, model: torch.nn.Module) -> None:
    """Writes names.json: the names in the file and the canonical ones, per canonical name."""
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    canonical = {name: t for name, t in model.state_dict().items() if name_is_saved(model, name)}
    by_bytes = {t.numpy().tobytes(): name for name, t in saved.items()}
    require(
        len(by_bytes) == len(canonical) == len(saved),
        "two tensors are equal, so names cannot be matched.",
    )
    spellings = {
        "saved": {n: by_bytes[t.contiguous().numpy().tobytes()] for n, t in canonical.items()},
        "canonical": {name: name for name in canonical},
    }
    ordered = {spelling: dict(sorted(names.items())) for spelling, names in spellings.items()}
    (folder / "names.json").write_text(
        json_text({"model_file_spelling": "saved", "spellings": ordered})
    )


def name_is_saved(model: torch.nn.Module, name: str) -> bool:
    """Whether a tensor is one of its own, not tied to another."""
    return name in {n for n, _ in model.named_parameters()}


def load_json(path: Path) -> dict[str, Any]:
    """A JSON file of one object."""
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the cases of a folder


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the pictures and clips of a family's cases are like: widths and heights in pixels."""

    one: tuple[int, int]
    two: tuple[tuple[int, int], tuple[int, int]]
    clip: tuple[int, int] = (35, 21)
    frames: int = 5
    fps: float | None = 2.5
    question: str = "what is in the scene?"


class Cases:
    """Searches and records the cases of one folder; a family overrides what differs."""

    first = Keep(pixels=True)  # of the case with one picture
    second = Keep(decoder=False, logits=False)  # of the case with two pictures
    clip = Keep(decoder=False)  # of the case with a clip
    tokenizer = True  # whether tokenizer_cases.json is written

    def __init__(
        self, run: Run, golden: Golden, seed: int, inputs: Inputs, kinds: frozenset[str]
    ) -> None:
        """kinds: the cases that are recorded; none: all of them. one_image always is."""
        self.run, self.golden, self.seed = run, golden, seed * 1000
        self.inputs, self.kinds = inputs, kinds

    def reorder(self, inputs: dict[str, Any], taps: dict[str, torch.Tensor]) -> None:
        """Puts features that the tower has in an order of its own into the prompt's."""

    def extra(
        self,
        case: str,
        request: Request,
        inputs: dict[str, Any],
        taps: dict[str, torch.Tensor],
        keep: Keep,
    ) -> None:
        """Adds tensors of this family and drops what is not kept."""

    def after_first(self, request: Request) -> None:
        """Records more cases with a picture."""

    def accepts_clip(self, request: Request, result: Greedy) -> bool:
        """Whether the clip will also do for what after_video records."""
        return True

    def after_video(self, request: Request) -> None:
        """Records more of the clip."""

    def template_options(self) -> dict[str, Any]:
        """Variables for the template of the conversation."""
        return {}

    def record(self, kind: str, request: Request, result: Greedy, keep: Keep, **more: Any) -> str:
        """Records one case and returns its prefix."""
        case = f"case{len(self.golden.manifest['cases'])}"

        def extra(inputs: dict[str, Any], taps: dict[str, torch.Tensor]) -> None:
            self.reorder(inputs, taps)
            self.extra(case, request, inputs, taps, keep)

        return record(self.golden, self.run, kind, request, result, keep, extra=extra, **more)

    def wants(self, kind: str) -> bool:
        """Whether the folder has this case."""
        return not self.kinds or kind in self.kinds

    def picture(self, number: int, seed: int, size: tuple[int, int]) -> tuple[str, np.ndarray]:
        """A picture and its file's name."""
        return f"image{number}.png", synthetic_image(*size, seed)

    def one(self, seed: int) -> Request:
        """One picture and a question."""
        picture = self.picture(0, seed, self.inputs.one)
        return Request([turn("<image>", self.inputs.question)], [picture])

    def two(self, seed: int) -> Request:
        """Two pictures of different size with text between."""
        pictures = [self.picture(k + 1, seed + k, self.inputs.two[k]) for k in range(2)]
        message = turn("this is the small one ", "<image>", " and the other ", "<image>", "?")
        return Request([message], pictures)

    def described(self, seed: int) -> Request:
        """One clip and what to do with it."""
        clip = synthetic_clip(*self.inputs.clip, self.inputs.frames, seed)
        message = turn("<video>", "describe the video")
        return Request([message], videos=[Video("video0", clip, self.inputs.fps)])

    def mixed(self, number: int, first: Request, clip: Request) -> Request:
        """The picture and the clip of other cases."""
        message = turn("<video>", "is it ", "<image>", f"{number}?")
        return Request([message], first.images, clip.videos)

    def text(self, number: int) -> Request:
        """No picture."""
        return Request([turn(f"tell me {number} colours in the scene")])

    def turns(self, number: int, first: Request) -> Request:
        """A system text and two turns about the picture of another case."""
        messages = [
            turn("be brief", role="system"),
            turn("<image>", "what is it?"),
            turn("A circle.", role="assistant"),
            turn(f"and {number} others?"),
        ]
        return Request(messages, first.images, template=self.template_options())

    def end(self, number: int) -> Request:
        """A question whose answer ends by itself."""
        return Request([turn(f"is it small? {number}")])

    def all(self) -> None:
        """Searches and records every case, and writes the folder's goldens."""
        run, seed = self.run, self.seed

        def changed_by_penalty(request: Request, result: Greedy) -> bool:
            other = attempt(run, request, repetition_penalty=1.05)
            return other is not None and other.ids != result.ids

        accept = changed_by_penalty if self.wants("repetition_penalty") else None
        first, result = search(run, "one image", seed, self.one, accept=accept)
        rope = run.model.config.text_config.rope_parameters
        if rope["rope_type"] != "dynamic":  # whose cached keys keep the angles of their time
            check_uncached(run, first, result)
        check_pictures_matter(run, first, result)
        case0 = self.record("one_image", first, result, self.first)
        if self.wants("repetition_penalty"):
            result = attempt(run, first, repetition_penalty=1.05)
            more = {"repetition_penalty": 1.05, "same_inputs_as": case0}
            self.record("repetition_penalty", first, result, Keep(), **more)
        if self.wants("two_images"):
            request, result = search(run, "two images", seed, self.two)
            self.record("two_images", request, result, self.second)
        self.after_first(first)
        clip = None
        if self.wants("video"):
            clip, result = search(run, "a video", seed, self.described, self.accepts_clip)
            check_pictures_matter(run, clip, result)
            self.record("video", clip, result, self.clip)
            self.after_video(clip)
        makers: list[tuple[str, Callable[[int], Request]]] = [
            ("image_and_video", lambda s: self.mixed(s - seed, first, clip)),
            ("text_only", lambda s: self.text(s - seed)),
            ("two_turns", lambda s: self.turns(s - seed, first)),
            ("eos", lambda s: self.end(s - seed)),
        ]
        for kind, make in makers:
            if self.wants(kind):
                request, result = search(run, kind, seed, make, want_eos=kind == "eos")
                self.record(kind, request, result, IDS_ONLY)
        if self.tokenizer:
            record_tokenizer(self.golden, run)
        self.golden.write()

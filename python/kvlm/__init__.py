"""Vision-language models with a KV cache that can be quantized, shared and cut, one policy a call.

    import kvlm

    with kvlm.Model("pocket") as model:
        print(model.generate("cat.png", "What is this?", kv="prefixkv,keep=0.5 + kivi").text)

The sentences of `kv` are those of the programs: docs/policies.md, or list_policies().
"""

from __future__ import annotations

import atexit
import difflib
import inspect
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _core
from .rules import Choice, Layer, array, claimed_bits, quantizer, retention

if TYPE_CHECKING:

    class Error(RuntimeError):
        """What cannot be done, and what to do next, in a sentence."""

        code: str  #: "invalid_argument", "corrupt_file", "unsupported", "out_of_memory", "device" or "cancelled"
else:
    from ._core import Error

__all__ = ["CacheReport", "Choice", "Clip", "Error", "Layer", "Model", "Piece", "Policy", "PolicyOption", "Prompt", "Result", "Timings",
           "TokenLogprob", "canonical", "explain", "list_policies", "quantizer", "retention"]  # fmt: skip

_LOOK_MS = 100  # how often a wait looks for Ctrl+C
_POLL_MS = 5  # how long a batch waits for one answer before it looks at the others


@dataclass(frozen=True)
class CacheReport:
    """What the cache of an answer held at its end.

    spec          the policy, with nothing left to a default
    f16_bytes     of plain 16-bit rows of the same tokens
    stored_bits   per element of all tokens, scales and masks included
    nominal_bits  what the policy claims: codes alone
    slots         rows kept, mean over layers
    claimed_bits  per element, by a simulated quantizer; else None
    """

    spec: str
    bytes: int
    f16_bytes: int
    stored_bits: float
    nominal_bits: float
    slots: float
    claimed_bits: float | None = None

    @property
    def simulated(self) -> bool:
        """Rows went through a quantizer in Python, and are stored unpacked: bytes and bits are not those of its codes."""
        return self.claimed_bits is not None

    def __str__(self) -> str:
        bits = f"{self.stored_bits:.2f} bits" if self.claimed_bits is None else f"{self.claimed_bits:.2f} bits (simulated)"
        return f"{self.spec}: {bits}, {self.slots:g} slots, {self.bytes:,} bytes"


@dataclass(frozen=True)
class Timings:
    """Milliseconds.

    ttft_ms    from the request's turn to its first token
    decode_ms  from the first token to the last
    """

    vision_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of probabilities by the model's own logits, before penalty and temperature.

    top  the likeliest tokens, as many as were asked for
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Result:
    """An answer.

    tokens         generated ids, the final one that ends the answer included
    finish_reason  "stop" or "length"
    prompt_tokens  visual tokens included
    json           the object that `vlm-run --json` prints
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    visual_tokens: int
    timings: Timings
    cache: CacheReport
    logprobs: list[TokenLogprob] | None = None
    json: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Piece:
    """What a stream brings at a time.

    tokens  of a stream with logprobs; else empty
    result  with the last piece
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    result: Result | None


@dataclass(frozen=True)
class PolicyOption:
    """An option of a policy.

    official  under profile=official: as the published code has it
    paper     under profile=paper
    """

    key: str
    legal: str
    default: str
    official: str
    paper: str
    help: str


@dataclass(frozen=True)
class Policy:
    """A cache policy, as `vlm-kv list` shows it.

    kind  "quantizer", "retention", "sharing" or "simulated quantizer"
    """

    name: str
    kind: str
    source: str
    stores: str
    composes: str
    options: list[PolicyOption]


class Prompt:
    """What a prompt left in the cache: copies in host memory, on a GPU, too; read-only, and numpy arrays where numpy is installed
    (without it they speak DLPack and the buffer protocol). They live as long as somebody holds one of them.

    tokens    ids; where an image or video is, its placeholder's
    modality  (n,) int16 of each token: -1 for text, else the number of the image or video
    logits    (vocab,) float32 of the next token
    layers    how many
    cache     CacheReport after the prompt
    """

    def __init__(self, cached: _core.CachedPrompt, cache: CacheReport) -> None:
        self._cached = cached
        self.tokens: list[int] = cached.tokens
        self.layers: int = cached.layers
        self.cache = cache
        self.modality: Any = array(cached.modality())
        self.logits: Any = array(cached.logits())

    def keys(self, layer: int) -> Any:
        """(kv_heads, slots, head_dim) float32: what attention reads, after RoPE, codes unpacked."""
        return array(self._cached.keys(self._number(layer)))

    def values(self, layer: int) -> Any:
        """(kv_heads, slots, head_dim) float32, as keys()."""
        return array(self._cached.values(self._number(layer)))

    def kept(self, layer: int) -> Any:
        """(kv_heads, slots) int32: which tokens of the prompt each KV head keeps, ascending."""
        return array(self._cached.kept(self._number(layer)))

    def tags(self, layer: int) -> Any:
        """(kv_heads, slots) int16: `modality` of the kept ones."""
        return array(self._cached.tags(self._number(layer)))

    def _number(self, layer: int) -> int:
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer is {layer}; expected 0 to {self.layers - 1}")
        return layer


class Clip:
    """A video in memory.

    frames  images of one size: paths, bytes of files, PIL images or uint8 arrays (height, width, 3)
    fps     frames a second, which models that tell the time need
    """

    def __init__(self, frames: Iterable[Any], fps: float = 0.0) -> None:
        self._video = _core.Video.from_frames([_pixels(frame) for frame in frames], fps)


def _array_of_pil(image: Any) -> Any:
    """A PIL image as something with a buffer."""
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return memoryview(rgb.tobytes()).cast("B", (rgb.height, rgb.width, 3))


def _is_pil(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "tobytes") and hasattr(value, "convert")


def _image(value: Any) -> _core.Image:
    """A path and bytes are decoded by kvlm; a PIL image or an array are pixels."""
    if isinstance(value, str | os.PathLike):
        return _core.Image.from_file(os.fsencode(value))
    if isinstance(value, bytes | bytearray):
        return _core.Image.from_bytes(bytes(value))
    if _is_pil(value):
        return _core.Image.from_pixels(_array_of_pil(value))
    try:
        return _core.Image.from_pixels(value)
    except TypeError:
        raise TypeError(
            f"an image is {_described(value)}; give a path, the bytes of a file, a PIL image or a uint8 array "
            "(height, width, 3)"
        ) from None


def _pixels(value: Any) -> _core.Image:
    """A frame, decoded."""
    if isinstance(value, str | os.PathLike | bytes | bytearray):
        try:
            from PIL import Image
        except ImportError:
            raise TypeError("a frame of a clip is a file; install Pillow, or give pixels") from None
        import io

        return _image(Image.open(io.BytesIO(value) if isinstance(value, bytes | bytearray) else value))
    return _image(value)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return f"a {kind} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}" if shape is not None else f"a {kind}"


def _list(value: Any) -> list[Any]:
    """One image or video, or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _logprob(token: int, found: tuple[float, tuple[tuple[int, float], ...]]) -> TokenLogprob:
    return TokenLogprob(token, found[0], list(found[1]))


def _result(text: str) -> Result:
    found = json.loads(text)
    kv, timings = found["kv"], found["timings"]
    if claimed_bits(kv["spec"]) is not None:
        kv["simulated"] = True
    logprobs = found.get("logprobs")
    return Result(
        found["text"], found["tokens"], found["finish_reason"], found["prompt_tokens"], found["visual_tokens"],
        Timings(timings["vision_ms"], timings["prefill_ms"], timings["ttft_ms"], timings["decode_ms"]),
        CacheReport(kv["spec"], kv["bytes"], kv["f16_bytes"], kv["stored_bits"], kv["nominal_bits"], kv["slots"], claimed_bits(kv["spec"])),
        None if logprobs is None else [TokenLogprob(e["token"], e["logprob"], [(t, p) for t, p in e["top"]]) for e in logprobs],
        found,
    )  # fmt: skip


_models: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A rule cannot run any more once the interpreter ends, and no thread may come back to it."""
    for model in list(_models):
        model.close()
    _core.settle()


class Model:
    """A loaded checkpoint. Calls from several threads are answered together, each as it would be alone.

    model         a folder, org/name in the Hugging Face cache, "pocket" (bundled), or synthetic:NAME
    kv            the policy of calls that name none
    device        "auto", "cpu" or "cuda[:N]"
    dtype         "auto" (as in the files), "f32", "f16" or "bf16"
    weights       "16", "int8" or "int4": what the decoder's matrices are rounded to while loading
    lora          folder of a PEFT adapter
    threads       of the CPU; 0: one per core
    cache_memory  of all caches together: bytes, or text as "8GB"; default: eight answers of the whole context, within a quarter
                  of the memory
    activations   bits of activations with quantized weights on a CPU: "8" or "16"
    kv_profile    file that `vlm-kv profile` measured on this model
    image_backend, image_aspect, tiles, min_pixels, max_pixels  how images are resized and cut, as vlm-run's options
    progress      called with (phase, done, total) while loading; what it raises ends that

    Raises Error. A model that was made before os.fork() refuses everything in the child.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "pocket",
        *,
        kv: str = "f16",
        device: str = "auto",
        dtype: str = "auto",
        weights: str | int = "16",
        lora: str | os.PathLike[str] | None = None,
        activations: str | int = "8",
        threads: int = 0,
        cache_memory: int | str | None = None,
        kv_profile: str | os.PathLike[str] | None = None,
        image_backend: str = "auto",
        image_aspect: str = "auto",
        tiles: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        progress: Callable[[str, int, int], object] | None = None,
    ) -> None:
        options = _core.Options()
        options.model = _model_path(model)
        options.kv = kv
        options.device, options.dtype, options.weights, options.activations = device, dtype, str(weights), str(activations)
        options.lora = os.fspath(lora) if lora is not None else ""
        options.kv_profile = os.fspath(kv_profile) if kv_profile is not None else ""
        options.threads = threads
        options.image_backend, options.image_aspect, options.max_tiles = image_backend, image_aspect, tiles
        options.min_pixels, options.max_pixels = min_pixels, max_pixels
        if isinstance(cache_memory, str):
            cache_memory = _core.parse_bytes("cache_memory", cache_memory)
        self._engine = _core.Engine(options, cache_memory, progress)
        _models.add(self)
        self.info: dict[str, Any] = json.loads(self._engine.info())

    def close(self) -> None:
        """Ends what is being answered, and refuses everything from now on."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"<kvlm.Model {self.info['name']} on {self.info['device']}, {self.info['weights']} weights, {self.info['cache_bytes']:,} bytes of cache>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def generate(self, images: Any = None, prompt: str | None = None, **options: Any) -> Result:
        """Answers a question about images, or describes them if there is none.

        images    one, or a list: a path, bytes of a file, a PIL image, a uint8 array (height, width, 3)
        prompt    the question
        options   videos (paths or Clip), messages in place of prompt, system, kv, max_tokens, temperature, top_p, top_k,
                  repetition_penalty, seed, stop, logprobs (so many alternatives a token), fps or frames of videos

        The tokens are those of `vlm-run` with the same options.
        """
        answer = self._ask(images, prompt, options)
        _await(answer)
        return _result(self._engine.result(answer))

    def stream(self, images: Any = None, prompt: str | None = None, **options: Any) -> Iterator[Piece]:
        """The same, piece by piece. A stream that is closed early ends its answer."""
        answer = self._ask(images, prompt, options)
        return self._pieces(answer)

    def _pieces(self, answer: _core.Answer) -> Iterator[Piece]:
        done = False
        try:
            while not done:
                text, tokens, logprobs, done = answer.wait(_LOOK_MS)
                if done or text:
                    found = [_logprob(token, each) for token, each in zip(tokens, logprobs, strict=True)]
                    yield Piece(text, tokens, found, _result(self._engine.result(answer)) if done else None)
        finally:
            answer.cancel()

    def prefill(
        self,
        images: Any = None,
        prompt: str | None = None,
        *,
        videos: Any = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        system: str | None = None,
        kv: str | None = None,
        fps: float | None = None,
        frames: int | None = None,
    ) -> Prompt:
        """Reads a question, and shows what it left in the cache and the logits of the first token of its answer. Arguments are
        those of generate(), which goes on from there. The cache is free again at once."""
        self._engine.require_open()
        question = _question(images, prompt, videos=videos, messages=messages, system=system, kv=kv, fps=fps, frames=frames, max_tokens=1)
        question.records = True
        answer = self._engine.ask(question)
        _await(answer)
        return Prompt(answer.cached(), _result(self._engine.result(answer)).cache)

    def batch(
        self, records: Iterable[Any], *, batch_size: int = 16, images: Any = None, prompt: str | None = None, **options: Any
    ) -> Iterator[tuple[int, Result | Error]]:
        """Answers many: yields (number of the record, Result) as they finish, or the Error of a record.

        records     what generate() takes, as mappings ("image" is short for "images"), or images alone
        batch_size  records that are read ahead, and answered together as far as the cache has room
        images, prompt, options  for records that do not have their own
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        running: list[tuple[int, _core.Answer]] = []
        source = enumerate(records)
        try:
            while True:
                while len(running) < batch_size and (entry := next(source, None)) is not None:
                    number, record = entry
                    try:
                        own = {"images": images, "prompt": prompt} | options | (dict(record) if isinstance(record, Mapping) else {"image": record})
                        if "image" in own:
                            own["images"] = own.pop("image")
                        running.append((number, self._ask(own.pop("images"), own.pop("prompt"), own)))
                    except Exception as error:
                        yield number, _error(error)
                if not running:
                    return
                finished = [entry for entry in running if entry[1].wait(0)[3]]
                if not finished:
                    running[0][1].wait(_POLL_MS)
                for done in finished:
                    running.remove(done)
                    try:
                        result: Result | Error = _result(self._engine.result(done[1]))
                    except Exception as error:
                        result = _error(error)
                    yield done[0], result
        finally:
            for _, answer in running:
                answer.cancel()

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to an answer: any bytes, half a character among them."""
        return self._engine.token_bytes(token)

    def _ask(self, images: Any, prompt: str | None, options: Mapping[str, Any]) -> _core.Answer:
        for name in options:
            if name not in _OPTIONS:
                near = difflib.get_close_matches(name, _OPTIONS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"there is no option {name}{hint} (options: {', '.join(_OPTIONS)})")
        self._engine.require_open()
        return self._engine.ask(_question(images, prompt, **options))


def _await(answer: _core.Answer) -> None:
    """Until it is done; whatever ends the wait, such as Ctrl+C, ends the answer."""
    try:
        while not answer.wait(_LOOK_MS)[3]:
            pass
    finally:
        answer.cancel()


def _error(error: Exception) -> Error:
    """What became of a record of a batch, as an Error whose cause is the exception."""
    if isinstance(error, Error):
        return error
    wrong = Error(f"{type(error).__name__}: {error}" if not isinstance(error, TypeError) else str(error))
    wrong.code = "invalid_argument"
    wrong.__cause__ = error
    return wrong


def _checked(name: str, value: Any, kind: type, expected: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}; expected {expected}")


def _int(value: int | None) -> int | None:
    return None if value is None else int(value)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _question(
    images: Any,
    prompt: str | None,
    *,
    videos: Any = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    system: str | None = None,
    kv: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    logprobs: int | None = None,
    fps: float | None = None,
    frames: int | None = None,
) -> _core.Question:
    for name, text in (("prompt", prompt), ("system", system), ("kv", kv)):
        _checked(name, text, str, "text")
    for name, number in (("max_tokens", max_tokens), ("top_k", top_k), ("seed", seed), ("logprobs", logprobs), ("frames", frames)):
        _checked(name, number, Integral, "an integer")
    for name, real in (("temperature", temperature), ("top_p", top_p), ("repetition_penalty", repetition_penalty), ("fps", fps)):
        _checked(name, real, Real, "a number")
    if seed is None or not 0 <= seed < 2**64:
        raise TypeError(f"seed is {seed}; expected 0 to 2**64 - 1")
    for name, number in (("max_tokens", max_tokens), ("top_k", top_k), ("logprobs", logprobs), ("frames", frames)):
        if number is not None and abs(number) >= 2**31:
            raise TypeError(f"{name} is {number}; expected less than 2**31")
    stop = [stop] if isinstance(stop, str) else list(stop or [])
    for text in stop:
        _checked("an entry of stop", text, str, "text")
    if messages is None and not _list(images) and not _list(videos) and not prompt:
        raise TypeError("there is nothing to answer; give images, videos, a prompt or messages")
    if messages is not None and len(messages) == 0:
        raise TypeError("messages is empty; give at least one of the user")
    question = _core.Question()
    if messages is not None and (images is not None or videos is not None or prompt is not None or system is not None):
        raise TypeError("messages hold their own images, videos and texts; drop images, videos, prompt and system")
    for message in messages or []:
        _add_message(question, message)
    for image in _list(images):
        question.add_image(_image(image))
    for video in _list(videos):
        question.add_video(_video(video))
    question.set_frames(_float(fps), _int(frames))
    question.system, question.prompt = system or "", prompt or ""
    question.kv = kv or ""
    question.max_tokens, question.top_k, question.logprobs = _int(max_tokens), _int(top_k), _int(logprobs)
    question.temperature, question.top_p, question.repetition_penalty = _float(temperature), _float(top_p), _float(repetition_penalty)
    question.seed, question.stop = int(seed), stop
    return question


_OPTIONS = tuple(inspect.signature(_question).parameters)[2:]


def _add_message(question: _core.Question, message: Mapping[str, Any]) -> None:
    for key in ("role", "content"):
        if key not in message:
            raise TypeError(f"a message has no {key}; expected role and content")
    content = message["content"]
    parts: list[tuple[str, str]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type")
        if kind in ("image", "video", "text") and kind not in part:
            raise TypeError(f"a part of a message is of type {kind!r} and has no {kind}; add it")
        if kind == "image":
            question.add_image(_image(part["image"]))
        elif kind == "video":
            question.add_video(_video(part["video"]))
        elif kind != "text":
            raise TypeError(f'a part of a message is of type {kind!r}; expected "text", "image" or "video"')
        parts.append((kind, part["text"] if kind == "text" else ""))
    question.add_message(message["role"], parts)


def _video(value: Any) -> _core.Video:
    if isinstance(value, Clip):
        return value._video
    if isinstance(value, str | os.PathLike):
        return _core.Video.from_file(os.fsencode(value))
    raise TypeError(f"a video is {_described(value)}; give a path or kvlm.Clip(frames, fps)")


def _model_path(model: str | os.PathLike[str]) -> str:
    """The bundled model lies beside this file where the module is installed."""
    name = os.fspath(model)
    inside = Path(__file__).parent / "pocket/pocket-llava"
    return str(inside) if name in ("pocket", "pocket-llava") and inside.is_dir() else name


def explain(
    kv: str, *, model: str | os.PathLike[str] = "pocket", tokens: int, visual: int = 0, kv_profile: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """What a policy stores after a prompt of `tokens` tokens, `visual` of them visual: the object that
    `vlm-kv explain --json` prints, with bytes by layer and component. Reads no weights."""
    profile = os.fspath(kv_profile) if kv_profile is not None else ""
    found: dict[str, Any] = json.loads(_core.explain(kv, _model_path(model), tokens, visual, profile))
    if claimed_bits(canonical(kv)) is not None:
        found["simulated"] = True
    return found


def list_policies(name: str = "") -> list[Policy]:
    """All policies, or the one of a name, with their options and sources."""
    return [
        Policy(p["name"], p["kind"], p["source"], p["stores"], p["composes"], [PolicyOption(**option) for option in p["options"]])
        for p in json.loads(_core.list_policies(name))
    ]


def canonical(kv: str) -> str:
    """The sentence of a policy as kvlm prints it, or Error with the nearest one."""
    return _core.canonical(kv)


__version__ = _core.version()

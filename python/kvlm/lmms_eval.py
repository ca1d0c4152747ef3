"""kvlm for lmms-eval 0.7, found by its entry point:

    python -m lmms_eval --model kvlm --model_args pretrained=pocket,kv=kivi --tasks docvqa_val

model_args: pretrained (as kvlm.Model's model), kv (in quotes if it holds commas), batch_size, and the options of kvlm.Model.
Images arrive as they are in the data set, without a lossy format in between.
"""

from __future__ import annotations

from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from lmms_eval.protocol import ChatMessages

import kvlm

_NUMBERS = ("threads", "cache_memory", "tiles", "min_pixels", "max_pixels")


def manifest() -> ModelManifest:
    return ModelManifest(model_id="kvlm", chat_class_path="kvlm.lmms_eval.Kvlm")


class Kvlm(lmms):  # type: ignore[misc]
    """Answers by kvlm in this process."""

    is_simple = False

    def __init__(self, pretrained: str = "pocket", batch_size: int | str = 16, **options: Any) -> None:
        super().__init__()
        known: dict[str, Any] = {key: int(value) if key in _NUMBERS else str(value).strip("\"'") for key, value in options.items() if key != "max_batch_size"}
        self.batch_size = int(batch_size)
        self.model = kvlm.Model(pretrained, **known)

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        answers: list[GenerationResult | None] = [None] * len(requests)
        for number, result in self.model.batch(map(self._record, requests), batch_size=max(self.batch_size, 1)):
            if isinstance(result, kvlm.Error):
                raise result
            counts = TokenCounts(input_tokens=result.prompt_tokens, output_tokens=len(result.tokens))
            answers[number] = GenerationResult(text=result.text, token_counts=counts)
        return [answer for answer in answers if answer is not None]

    def _record(self, request: Instance) -> dict[str, Any]:
        _, doc_to_messages, wanted, doc_id, task, split = request.args
        messages = []
        for message in ChatMessages(messages=doc_to_messages(self.task_dict[task][split][doc_id])).messages:
            parts = [{"type": part.type, part.type: getattr(part, "url", None) or getattr(part, "text", None)} for part in message.content]
            messages.append({"role": message.role, "content": parts})
        stop = wanted.get("until") or []
        record: dict[str, Any] = {"messages": messages, "stop": [stop] if isinstance(stop, str) else [text for text in stop if text]}
        if "max_new_tokens" in wanted:
            record["max_tokens"] = int(wanted["max_new_tokens"])
        for key in ("temperature", "top_p"):
            if wanted.get("do_sample", True) and wanted.get(key):
                record[key] = float(wanted[key])
        return record

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("kvlm generates; tasks that compare log likelihoods are not served")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("kvlm serves tasks of one round")

"""What LLaVA-NeXT and LLaVA-OneVision share: a base tile, the tiles of a canvas, packed features."""

from __future__ import annotations

from typing import Any

import torch
from cases import Cases, Keep, Request, Tap
from common import require


def unpadded(pixels: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The tiles of every picture one after the other, without those that fill up the batch."""
    return torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])


class AnyresCases(Cases):
    """Adds tile counts, tiles as bytes and the features of each picture as they are inserted."""

    clip = Keep(decoder=False, logits=False)

    def counts(self, inputs: dict[str, Any]) -> list[int]:
        """Tiles of each picture, the base among them."""
        raise NotImplementedError

    def extra(
        self,
        case: str,
        request: Request,
        inputs: dict[str, Any],
        taps: dict[str, torch.Tensor],
        keep: Keep,
    ) -> None:
        """Adds tiles and packed features."""
        run, golden, model = self.run, self.golden, self.run.model.model
        if request.images:
            counts = self.counts(inputs)
            golden.add(f"{case}.num_patches", torch.tensor(counts))
            if keep.vision:
                raw = run.processor.image_processor(
                    run.pictures(request),
                    do_rescale=False,
                    do_normalize=False,
                    return_tensors="pt",
                )["pixel_values"]
                self.add_bytes(f"{case}.tiles_u8", unpadded(raw, counts))
                options = {k: inputs[k] for k in ("batch_num_images",) if k in inputs}
                packed = model.get_image_features(
                    inputs["pixel_values"], inputs["image_sizes"], return_dict=True, **options
                ).pooler_output
                for k, rows in enumerate(packed):
                    taps[f"packed_features.{k}"] = rows
            inputs["pixel_values"] = unpadded(inputs["pixel_values"], counts)
        if request.videos and keep.vision:
            raw = run.processor.video_processor(
                [video.frames for video in request.videos],
                do_rescale=False,
                do_normalize=False,
                return_tensors="pt",
            )["pixel_values_videos"]
            self.add_bytes(f"{case}.video.tiles_u8", raw.flatten(0, 1))
            taps["video.packed_features.0"] = model.get_video_features(
                inputs["pixel_values_videos"], return_dict=True
            ).pooler_output[0]
        for prefix in ("", "video."):
            if f"{prefix}projector_in" in taps:
                require(
                    torch.equal(
                        taps[f"{prefix}vision.selected"], taps.pop(f"{prefix}projector_in")
                    ),
                    "the projector got other features than the selected ones.",
                )

    def add_bytes(self, name: str, tiles: torch.Tensor) -> None:
        """Adds tiles of whole bytes, channels last."""
        raw = tiles.to(torch.uint8)
        require(bool((raw == tiles).all()), f"{name} is not made of whole bytes.")
        self.golden.add(f"{name}.{self.run.backend}", raw.permute(0, 2, 3, 1))


def projector_taps(model: Any) -> list[Tap]:
    """The projector's ends."""
    return [
        Tap(model.multi_modal_projector, "projector_in", before=True),
        Tap(model.multi_modal_projector, "projector_out"),
    ]


def patch_rows(maps: torch.Tensor) -> torch.Tensor:
    """A convolution's output (tiles, width, rows, columns) as rows of patches."""
    return maps.flatten(2).transpose(1, 2)

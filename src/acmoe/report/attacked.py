"""Route the images of the sample once more after a small fixed attack.

B images, N patches of all of them.
"""

from typing import Any

import torch
from torch import Tensor

from acmoe.analyze.record import LayerRecord, RoutingRecord, record_images
from acmoe.config.images.attack import AttackConfig, FGSMConfig, eps_text
from acmoe.data.images.splits import ImageSet
from acmoe.errors import UserError
from acmoe.evaluate.images.attacked import attacked_images
from acmoe.evaluate.run import ImageRun
from acmoe.models.images.classifier import ImageClassifier
from acmoe.report.sample import png_uri

# One gradient step. `acmoe attack` measures robustness; this one only shows what moves.
ATTACK = AttackConfig(attack=FGSMConfig(), eps=(4 / 255,))


def attacked_routing(
    model: ImageClassifier,
    run: ImageRun,
    images: ImageSet,
    clean: RoutingRecord,
    *,
    shown: int,
) -> dict[str, Any] | str:
    """Return the routing of the attacked images, or one line that says why there is none.

    The images are those of `clean`, in the same batches, since images of one batch may influence
    each other. Pictures and patches are those of the first `shown` images; counts are over all.
    """
    device = next(model.parameters()).device
    assert clean.labels is not None and clean.predicted is not None
    count = len(clean.labels)
    try:
        record = record_images(
            model,
            images,
            run.config.data,
            count=count,
            batch=clean.batch,
            precision=run.config.precision,
            reading=attacked_images(model, run.config.data, ATTACK, device),
        )
    except UserError as error:
        return f"the images could not be attacked: {error}"
    assert record.pixels is not None and record.predicted is not None
    names = images.classes
    return {
        "how": f"{ATTACK.attack.name.upper()}, radius {eps_text(ATTACK.eps[0])}",
        "images": [png_uri(pixels_CYX) for pixels_CYX in record.pixels[:shown]],
        "predicted": [names[one] for one in record.predicted[:shown].tolist()],
        "count": count,
        "right": _right(clean.predicted, clean.labels),
        "right_attacked": _right(record.predicted, clean.labels),
        "layers": [
            _layer(before, after, shown * before.grid[0] * before.grid[1])
            for before, after in zip(clean.layers, record.layers, strict=True)
            if before.grid is not None
        ],
    }


def _right(predicted_B: Tensor, label_B: Tensor) -> int:
    return int((predicted_B == label_B).sum())


def _layer(before: LayerRecord, after: LayerRecord, shown: int) -> dict[str, Any]:
    """Return the first expert of the shown attacked patches, its gate, and how many patches moved.

    `moved` is the percentage of all patches whose first expert the attack changes.
    """
    at_first_NK = after.expert_ids == after.first[:, None]
    gate_N = torch.where(at_first_NK, after.gate, torch.zeros(())).sum(1)
    moved = (before.first != after.first).double().mean()
    return {
        "first": after.first[:shown].tolist(),
        "gate": [round(gate, 3) for gate in gate_N[:shown].double().tolist()],
        "moved": round(100 * float(moved), 2),
    }

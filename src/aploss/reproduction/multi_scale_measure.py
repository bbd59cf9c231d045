"""AP of a run's detector when every image is tested at several scales."""

import json
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from aploss.detectors.checkpoint_io import load
from aploss.detectors.detector import Detector
from aploss.detectors.multi_scale import Detections, MultiScale
from aploss.evaluation.voc_metrics import voc_metrics
from aploss.files import write_json
from aploss.reporting.comparison_data import Curve
from aploss.reproduction.measure import METRICS, VOC_AP50, DetectionMeasure, Run
from aploss.training.datasets import load_run_data
from aploss.training.distributed import World
from aploss.training.hardware import choose_device, choose_workers
from aploss.training.validation import Split, detect_split

__all__ = ["MultiScaleMeasure"]


class MultiScaleMeasure(DetectionMeasure):
    """As :class:`DetectionMeasure`, but the final numbers are those of several scales.

    They are measured once and kept in the run folder.

    Args:
        scales: the views of an image; by default those of ``MultiScale``.
    """

    def __init__(self, scales: MultiScale | None = None) -> None:
        self.scales = scales or MultiScale()

    def curve(self, run: Run) -> Curve:
        """None: on the way there only one scale was looked at."""
        return Curve(steps=[], values=[])

    def values(self, run: Run) -> Mapping[str, float | None]:
        file = run.folder / "evaluation" / "multi_scale.json"
        views = {"scales": self.scales.scales, "flip": self.scales.flip}
        if file.is_file():
            known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if known["views"] == json.loads(json.dumps(views)):
                return cast(dict[str, float | None], known["values"])
        found = _measure(run, self.scales)
        write_json(file, {"views": views, "values": found})
        return found


def _measure(run: Run, scales: MultiScale) -> dict[str, float | None]:
    device = choose_device(run.config.device)
    detector = load(run.folder, device=device)
    dataset = load_run_data(run.config).evaluation
    assert dataset is not None
    split = Split(dataset)
    looking = cast(Detector, _SeveralScales(detector, scales))
    config = run.config
    found = detect_split(
        looking,
        split,
        World(),
        batch_size=config.validation.batch_size,
        workers=choose_workers(config.batches.workers, device, 1),
    )
    assert found is not None
    metrics = split.measure(found, detector).as_dict()
    values: dict[str, float | None] = {name: metrics[name] for name in METRICS}
    if config.evaluation.voc_year is not None:
        voc = voc_metrics(split.truth, found, year=config.evaluation.voc_year)
        values[VOC_AP50] = voc.AP50
    return values


class _SeveralScales(nn.Module):
    """A detector whose call looks at every image several times."""

    def __init__(self, detector: Detector, scales: MultiScale) -> None:
        super().__init__()
        self.detector, self.scales = detector, scales

    def forward(self, images: list[Tensor]) -> list[Detections]:
        return self.scales(self.detector, images)

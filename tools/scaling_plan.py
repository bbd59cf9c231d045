"""Estimates training on several GPUs (see ``docs/scaling.md``): hours, bytes and seconds of a step for 1 to 512 GPUs.

Nothing here is measured on a GPU. Bytes on the network are those of :func:`traffic`; the seconds
of labels and ranking are the bytes that their torch operations read and write, counted here on one image and scaled to
a batch, divided by the bandwidth of the memory.

    python tools/scaling_plan.py
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aploss.detectors import build_detector
from aploss.losses import ap_loss, use_backend

SPEED = 60.0  # images per second and GPU at 512 x 512 pixels
BANDWIDTH = 1.5e12  # bytes per second of a GPU's memory
NETWORK = 10e9  # bytes per second between GPUs
LATENCY = 10e-6  # seconds of a step of a ring; a ranking has 4 (R - 1) of them
BATCH, CLASSES, SIZE = 8, 80, 512
POSITIVES, BOXES = 500, 7  # positives in a batch, objects in an image
GPUS = (1, 8, 64, 512)
WORK = {"COCO, 100 epochs": 118_287 * 100, "a million images, 100 epochs": 1_000_000 * 100}


class Bytes(TorchDispatchMode):
    """Adds up what the operations in a block read and write."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.total += sum(one.nbytes for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor))
        return found


def traffic(processes: int, positives: int) -> int:
    """Bytes that a process hands in to rank with ``positives`` in each process: status, positives, tallies."""
    return 3 * 8 + 8 * positives + 16 * (2 * processes * positives + 2)


def label_bytes(detector: Any) -> int:
    """Bytes of assigning the anchors of one image."""
    anchors = detector.anchors_for(SIZE, SIZE, torch.device("cpu"))
    corners = torch.rand(BOXES, 2) * SIZE / 2
    target = {"boxes": torch.cat([corners, corners + SIZE / 4], 1), "labels": torch.arange(BOXES)}
    with Bytes() as counted, torch.no_grad():
        detector.criterion.label(anchors, [target])
    return counted.total


def rank_bytes(scores: int, positives: int) -> int:
    """Bytes of AP-loss and its gradient with the torch backend."""
    logits = torch.randn(scores)
    targets = torch.zeros(scores)
    targets[:positives] = 1
    with use_backend("torch"), Bytes() as counted:
        ap_loss(logits.requires_grad_(), targets).backward()
    return counted.total


def main() -> None:
    """Prints the assumptions and the table."""
    detector = build_detector("retinanet-r50", class_names=tuple(map(str, range(CLASSES))))
    parameters = sum(one.numel() for one in detector.parameters())
    anchors = sum(map(len, detector.anchors_for(SIZE, SIZE, torch.device("cpu"))))
    small = rank_bytes(100_000, 10)
    per_score = (rank_bytes(200_000, 10) - small) / 100_000
    per_positive = (rank_bytes(100_000, 1010) - small) / 1000
    scores = BATCH * anchors * CLASSES
    labels = BATCH * label_bytes(detector) / BANDWIDTH
    print(f"retinanet-r50: {parameters:,} parameters, {anchors:,} anchors, {scores:,} scores in a batch of {BATCH}")
    print(
        f"ranking: {per_score:.0f} bytes a score, {per_positive:.0f} bytes a positive; labels {1e3 * labels:.2f} ms\n"
    )
    columns = ["GPUs", *(f"{name}: hours" for name in WORK), "gradients, MB a step", "ranking, MB a step",
               "labels, ms", "ranking, ms", "step, ms"]  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---:|" * len(columns))
    for count in GPUS:
        hours = [f"{images / SPEED / count / 3600:,.1f}" for images in WORK.values()]
        ring = 2 * (count - 1) / count
        sent = traffic(count, POSITIVES) if count > 1 else 0
        ranking = (scores * per_score + count * POSITIVES * per_positive) / BANDWIDTH
        ranking += sent / NETWORK + 4 * (count - 1) * LATENCY
        cells = [f"{count}", *hours, f"{ring * 4 * parameters / 1e6:.0f}", f"{sent / 1e6:.2f}"]
        cells += [f"{1e3 * labels:.2f}", f"{1e3 * ranking:.1f}", f"{1e3 * BATCH / SPEED:.0f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

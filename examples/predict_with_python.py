"""Objects in pictures from Python: load a trained run, hand over paths, arrays or tensors.

``python examples/predict_with_python.py runs/demo photo.jpg ...`` uses a run of yours. Without
arguments a tiny detector is trained on built-in pictures for a few steps first.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch

from aploss.data import builtin_dataset, make_training_loader
from aploss.detectors import build_detector, load, save_detector


def train_for_a_moment(steps: int = 20) -> tuple[Path, list[Path]]:
    """A detector file of a short training, and pictures it has not seen."""
    torch.manual_seed(0)
    train, val = (builtin_dataset(split, counts=(160, 4, 4)) for split in ("train", "val"))
    detector = build_detector("retinanet-tiny", class_names=train.class_names, test_size=(128, 128))
    optimizer = torch.optim.AdamW(detector.parameters(), lr=3e-3)
    batches = make_training_loader(train, batch_size=8, seed=0, preset="light", size=128)
    for _, (images, targets, *_) in zip(range(steps), batches.epoch(0), strict=False):
        losses = detector(images, targets)
        optimizer.zero_grad()
        (losses["classification"] + losses["box"]).backward()
        optimizer.step()
    file = save_detector(detector, Path(mkdtemp()) / "detector.pt")
    return file, [Path(val.image_path(index)) for index in range(2)]


run, pictures = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 2 else train_for_a_moment()
detector = load(run)
for found in detector.predict(pictures):
    print(f"{found.path}: {len(found)} objects")
    for name, score, box in zip(found.class_names[:3], found.scores, found.boxes, strict=False):
        print(f"  {name} {score:.2f} at {[round(corner) for corner in box.tolist()]}")

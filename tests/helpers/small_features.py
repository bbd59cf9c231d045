"""A small dataset and its stored features, for tests of the feature cache and for processes that are killed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from aploss.data.annotations import DetectionDataset
from aploss.data.features import FeatureMaps, StoredFeatures, store_features
from aploss.data.loader import AugmentedSamples

SIZE = (32, 48)
IMAGES = 9


def network(images: torch.Tensor) -> FeatureMaps:
    """Two maps that know left from right."""
    weighted = images * torch.linspace(1, 2, images.shape[-1])
    return FeatureMaps((F.avg_pool2d(weighted, 8), F.avg_pool2d(weighted[:, :1], 16)), SIZE)


def never(images: torch.Tensor) -> FeatureMaps:
    raise AssertionError("computed a second time")


def noisy_dataset(tmp_path: Path, counts: Sequence[int] = (2,) * IMAGES, **columns: Any) -> DetectionDataset:
    """Noisy images of different size, image k with ``counts[k]`` boxes."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir(exist_ok=True)
    sizes = [(60 + 3 * k, 40 + k) for k in range(len(counts))]
    for k, (width, height) in enumerate(sizes):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{k}.png")
    corners = random.uniform(0, 20, (sum(counts), 2))
    return DetectionDataset(
        root=tmp_path / "images",
        class_names=("a", "b"),
        image_paths=[f"{k}.png" for k in range(len(counts))],
        image_sizes=sizes,
        boxes_per_image=counts,
        boxes=np.concatenate([corners, corners + 15], axis=1),
        labels=np.arange(sum(counts)) % 2,
        **columns,
    )


def augmented(dataset: DetectionDataset, preset: str = "light", size: tuple[int, int] = SIZE) -> AugmentedSamples:
    return AugmentedSamples(dataset, seed=0, preset=preset, size=size)


def stored(
    dataset: DetectionDataset, compute=network, samples: AugmentedSamples | None = None, **changes
) -> StoredFeatures:
    options = {"views": 3, "network_digest": "one", "cache": dataset.root.parent / "cache", **changes}
    return store_features(samples or augmented(dataset), compute, **options)


def contents(features: StoredFeatures) -> list[torch.Tensor]:
    keys = [(index, view) for index in range(IMAGES) for view in range(features.views)]
    return [features.read(*key) for key in keys] + [features.target(*key)["boxes"] for key in keys]

"""A small dataset and its stored features, for tests of the feature cache and for processes that are killed."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from aploss.data.annotations import DetectionDataset
from aploss.data.features import FeatureMaps, StoredFeatures, Views, store_features
from aploss.data.loader import AugmentedSamples

SIZE = (32, 48)
IMAGES = 9


def network(images: torch.Tensor) -> FeatureMaps:
    """Two maps that know left from right."""
    weighted = images * torch.linspace(1, 2, images.shape[-1])
    return FeatureMaps((F.avg_pool2d(weighted, 8), F.avg_pool2d(weighted[:, :1], 16)), SIZE)


def noisy_dataset(tmp_path: Path) -> DetectionDataset:
    """Nine noisy images of different size, with two boxes each."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir(exist_ok=True)
    sizes = [(60 + 3 * k, 40 + k) for k in range(IMAGES)]
    for k, (width, height) in enumerate(sizes):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{k}.png")
    corners = random.uniform(0, 20, (2 * IMAGES, 2))
    return DetectionDataset(
        root=tmp_path / "images",
        class_names=("a", "b"),
        image_paths=[f"{k}.png" for k in range(IMAGES)],
        image_sizes=sizes,
        boxes_per_image=[2] * IMAGES,
        boxes=np.concatenate([corners, corners + 15], axis=1),
        labels=np.arange(2 * IMAGES) % 2,
    )


def drawn(dataset: DetectionDataset, count: int = 3, preset: str = "light") -> Views:
    return Views(preset, count, AugmentedSamples(dataset, seed=0, preset=preset, size=SIZE).__getitem__)


def stored(dataset: DetectionDataset, compute=network, views: Views | None = None, **changes) -> StoredFeatures:
    options = {"network_digest": "one", "size": SIZE, "cache": dataset.root.parent / "cache", **changes}
    return store_features(dataset, compute, views or drawn(dataset), **options)


def contents(features: StoredFeatures) -> list[torch.Tensor]:
    keys = [(index, view) for index in range(IMAGES) for view in range(features.views)]
    return [features.read(*key) for key in keys] + [features.target(*key)["boxes"] for key in keys]

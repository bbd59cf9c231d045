"""How long a plan would take on this machine, from one measured training step."""

import time
from dataclasses import replace

import torch

from aploss.reproduction.execute import runs_of
from aploss.reproduction.plan import Plan
from aploss.training.config import TrainConfig
from aploss.training.hardware import choose_device
from aploss.training.random_state import seeded
from aploss.training.run import make_detector

__all__ = ["describe_days", "estimated_days", "seconds_per_image"]

CLASSES = 20
MOST_PIXELS = 512 * 512
MOST_STEPS, LONG_ENOUGH = 8, 4.0  # how many steps to measure, and for how many seconds


def estimated_days(plan: Plan, epoch_images: int) -> float:
    """Days of training of all runs of a plan, validation and reading of images not counted.

    Args:
        plan: whose rows all have the first row's detector, image size and schedule.
        epoch_images: images of the training split.
    """
    config = plan.variants[0].config
    length = config.schedule.length
    if config.schedule.unit == "epochs":
        images = length * epoch_images
    else:
        images = length * config.batches.size * config.batches.accumulate
    return runs_of(plan) * images * seconds_per_image(config) / 86_400


def seconds_per_image(config: TrainConfig) -> float:
    """Seconds of forward and backward pass for one image, measured on random pixels.

    Small images are measured in a batch, of which large ones would need too long.
    """
    device = choose_device(config.device)
    size = config.batches.image_size
    height, width = (size, size) if isinstance(size, int) else size
    count = max(1, min(config.batches.size, MOST_PIXELS // (height * width)))
    fresh = replace(config, model=replace(config.model, weights=None))  # no download for that
    with seeded(config.seed, deterministic=False):
        detector = make_detector(fresh, tuple(f"class {k}" for k in range(CLASSES))).to(device)
        images = torch.rand(count, 3, height, width, device=device)
        corner = min(height, width) / 4
        box = torch.tensor([[corner, corner, 3 * corner, 3 * corner]], device=device)
        targets = [{"boxes": box, "labels": torch.tensor([0], device=device)}] * count
        times: list[float] = []
        while len(times) < 2 or (len(times) < MOST_STEPS and sum(times) < LONG_ENOUGH):
            start = time.perf_counter()
            losses = detector(images, targets)
            sum(losses.values(), torch.zeros((), device=device)).backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    return min(times[1:]) / count  # the first one also compiles and allocates


def describe_days(days: float) -> str:
    """A long time for people.

    Example:
        >>> describe_days(0.01), describe_days(0.5), describe_days(400.0)
        ('14 minutes', '12 hours', '400 days')
    """
    if days * 24 < 1:
        return f"{max(1, round(days * 1440))} minutes"
    if days < 2:
        return f"{round(days * 24)} hours"
    return f"{round(days)} days"

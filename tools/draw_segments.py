"""Draws docs/images/segments.svg: how positives cut the score axis, and the gradient of a negative along it.

Run with: python tools/draw_segments.py [FILE]
"""

import sys

import matplotlib.pyplot as plt
import torch

from aploss.losses import ap_loss

DELTA = 1.0
POSITIVES, NEGATIVES = (-0.6, 0.5, 2.6), (-2.6, -1.1, 0.1, 0.9, 1.8, 3.2)
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"


def gradient_at(place: float) -> float:
    """The gradient of a negative at a place, for the weights that the other scores give the positives."""
    scores = torch.tensor([*POSITIVES, *NEGATIVES], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1] * len(POSITIVES) + [0] * len(NEGATIVES))
    ap_loss(scores, targets, delta=DELTA, interpolated=False).backward()
    own = -scores.grad[: len(POSITIVES)]  # L_i / |P|
    ramps = ((scores.detach()[None, len(POSITIVES) :] - torch.tensor(POSITIVES)[:, None]) / 2 + 0.5).clamp(0, 1)
    steps = ((place - torch.tensor(POSITIVES)) / 2 + 0.5).clamp(0, 1)
    return float((own / ramps.sum(1) * steps).sum())


def draw(file: str) -> None:
    edges = sorted(score + side * DELTA for score in POSITIVES for side in (-1, 1))
    figure, (steps, line) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.6), height_ratios=(1, 1.2))
    places = torch.linspace(-3.2, 4.4, 400)
    for place in POSITIVES:
        steps.plot(places, ((places - place) / 2 + 0.5).clamp(0, 1), color=BLUE, alpha=0.6)
        steps.plot([place], [0.5], "o", color=BLUE, markersize=7)
    steps.set_ylabel("step f(s - sᵢ)\nof each positive")
    line.plot(places, [gradient_at(float(place)) for place in places], color=RED)
    line.plot(NEGATIVES, [gradient_at(place) for place in NEGATIVES], "o", color=RED, markersize=6)
    line.set_ylabel("gradient of a\nnegative at s")
    line.set_xlabel("score s")
    for axes in (steps, line):
        for number, (left, right) in enumerate(zip([-3.2, *edges], [*edges, 4.4], strict=True)):
            axes.axvspan(left, right, color=GREY, alpha=0.10 if number % 2 else 0.0, linewidth=0)
        for edge in edges:
            axes.axvline(edge, color=GREY, linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-3.2, 4.4)
    steps.set_title(
        "Three positives (blue) cut the score axis at sᵢ ± δ; within a segment everything is linear", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.endswith("svg") else None)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "segments"
    draw(sys.argv[1] if len(sys.argv) > 1 else "docs/images/segments.svg")

"""Draws docs/images/idea.svg: how AP-loss and focal loss move the same scores.

Run with: python tools/draw_idea.py [FILE]
"""

import sys

import matplotlib.pyplot as plt
import torch

from aploss.losses import ap_loss, focal_loss

POSITIVES, NEGATIVES = (3.0, 1.7, 0.1), (2.3, 0.8, -0.7, -1.3, -1.9, -2.4, -2.9)
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
TARGETS = torch.tensor([1] * len(POSITIVES) + [0] * len(NEGATIVES))


def updates(loss) -> torch.Tensor:
    """The negative gradient of each score, scaled so that the largest is 1."""
    scores = torch.tensor([*POSITIVES, *NEGATIVES], dtype=torch.float64, requires_grad=True)
    loss(scores, TARGETS).backward()
    return -scores.grad / scores.grad.abs().max()


def draw(file: str) -> None:
    order = torch.tensor([*POSITIVES, *NEGATIVES]).argsort(descending=True)
    found = TARGETS[order].cumsum(0)
    rows = (("AP-loss", lambda s, t: ap_loss(s, t, delta=0.5)), ("focal loss", focal_loss))
    figure, axes = plt.subplots(3, 1, figsize=(6.4, 4.8), height_ratios=(1, 1.15, 1.15))
    ranking = axes[0]
    for place, index in enumerate(order.tolist()):
        positive = bool(TARGETS[index])
        ranking.scatter(place, 0, s=330, color=BLUE if positive else "white", edgecolors=BLUE if positive else GREY)
        ranking.text(place, 0, place + 1, ha="center", va="center", color="white" if positive else GREY, fontsize=10)
        if positive:
            precision = f"{found[place]}/{place + 1}"
            ranking.text(place, -0.85, precision, ha="center", va="center", color=BLUE, fontsize=11)
    precisions = [float(found[place]) / (place + 1) for place in range(len(order)) if TARGETS[order[place]]]
    average = sum(precisions) / len(precisions)
    ranking.set_title(f"ranked by score: objects (blue) among background, AP = {average:.2f}", fontsize=11, loc="left")
    ranking.text(len(order) - 0.5, -0.85, "precision at each object", ha="right", va="center", color=GREY, fontsize=9)
    ranking.set(xlim=(-0.6, len(order) - 0.4), ylim=(-1.3, 0.8))
    for line, (name, loss) in zip(axes[1:], rows, strict=True):
        line.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        for score, move, positive in zip([*POSITIVES, *NEGATIVES], updates(loss).tolist(), TARGETS, strict=True):
            colour = BLUE if positive else ORANGE
            line.scatter(score, 0, s=55, color=BLUE if positive else "white", edgecolors=BLUE if positive else GREY)
            if abs(move) > 0.01:
                arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 5, "shrinkB": 0}
                line.annotate("", (score, 0.95 * move), (score, 0), arrowprops=arrow)
        line.set_title(f"{name}: update of each score", fontsize=11, loc="left")
        line.set(xlim=(3.4, -3.3), ylim=(-1.15, 1.15))
    axes[2].set_xlabel("score", fontsize=10)
    for axis in axes:
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
    for axis in axes[:2]:
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.endswith("svg") else None)


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "idea"
    draw(sys.argv[1] if len(sys.argv) > 1 else "docs/images/idea.svg")

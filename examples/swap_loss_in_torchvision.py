"""AP-loss in a torchvision detector you already have: one line, nothing else changes.

Run it with ``python examples/swap_loss_in_torchvision.py``; a few steps on a CPU take seconds.
"""

import torch
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

from aploss.data import builtin_dataset, make_training_loader
from aploss.integrations import use_loss
from aploss.losses import APLoss

torch.manual_seed(0)
dataset = builtin_dataset("train", counts=(16, 4, 4))
model = ssdlite320_mobilenet_v3_large(
    weights=None,  # or "DEFAULT" for COCO's, then with its 91 classes
    weights_backbone=None,
    num_classes=1 + len(dataset.class_names),  # torchvision's label 0 is the background
)
use_loss(model, APLoss(), score_thresh=0)  # the one line; the scores have an order and no scale

batches = make_training_loader(dataset, batch_size=4, seed=0, preset="light", size=160)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (images, targets, *_) in enumerate(batches.epoch(0)):
    for target in targets:
        target["labels"] = target["labels"] + 1
    losses = model(list(images), targets)
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    print(f"step {step}: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))

model.eval()  # inference is torchvision's own, untouched
with torch.no_grad():
    (found,) = model([images[0]])
print(f"{len(found['boxes'])} detections")

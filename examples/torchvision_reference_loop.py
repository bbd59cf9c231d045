"""AP-loss in the usual loop for torchvision: AMP, accumulation, EMA and several processes.

``python examples/torchvision_reference_loop.py``, or with two processes whose scores are ranked
together: ``torchrun --nproc-per-node 2 examples/torchvision_reference_loop.py``.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

from aploss import APLoss
from aploss.data import builtin_dataset, make_training_loader
from aploss.integrations import use_loss

ACCUMULATE = 2  # batches per step of the optimizer; each of them is ranked alone
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
processes = int(os.environ.get("WORLD_SIZE", "1"))
if processes > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank = dist.get_rank() if processes > 1 else 0

torch.manual_seed(0)
model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=6).to(device)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
use_loss(model, APLoss(process_group=dist.group.WORLD if processes > 1 else None), score_thresh=0)
parallel = DistributedDataParallel(model) if processes > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
precision = torch.float16 if device.type == "cuda" else torch.bfloat16

dataset = builtin_dataset("train", counts=(16, 4, 4))
batches = make_training_loader(dataset, batch_size=4, seed=rank, preset="light", size=160)
for number, (images, targets, *_) in enumerate(batches.epoch(0), start=1):
    inputs = [image.to(device) for image in images]
    labels = [{key: t[key].to(device) for key in ("boxes", "labels")} for t in targets]
    for label in labels:
        label["labels"] += 1  # torchvision's label 0 is the background
    steps_now = number % ACCUMULATE == 0
    with nullcontext() if steps_now or processes == 1 else parallel.no_sync():
        with torch.autocast(device.type, dtype=precision):
            losses = parallel(inputs, labels)
        scaler.scale(sum(losses.values()) / ACCUMULATE).backward()
    if steps_now:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update_parameters(model)
        print(f"process {rank}, batch {number}: classification {losses['classification']:.4f}")
if processes > 1:
    dist.destroy_process_group()

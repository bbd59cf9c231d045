"""Several gloo processes rank as one would: each with its part, some with nothing to rank."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from aploss.losses import APLoss, AUCLoss, ap_loss

LOSSES = {"ap": APLoss, "auc": AUCLoss}


def split_boxes(make_boxes, sizes, positives_of):
    """Boxes of one batch, part by part; ``positives_of`` says which parts keep their positives."""
    scores, targets = make_boxes("random", 60, sum(sizes) - 60, ignored=0, dtype=torch.float64)
    parts = list(zip(scores.split(sizes), targets.split(sizes), strict=True))
    return [
        (part, target if keeps else target.clamp(max=0))
        for (part, target), keeps in zip(parts, positives_of, strict=True)
    ]


def run_processes(worker, parts, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (folder, parts, *arguments), nprocs=len(parts), start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(len(parts))]


def join_group(rank, folder, parts):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", len(parts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(parts), timeout=timedelta(seconds=60))


def rank_part(rank, folder, parts, name):
    join_group(rank, folder, parts)
    scores, targets = parts[rank]
    scores.requires_grad_()
    loss = LOSSES[name](process_group=dist.group.WORLD)(scores, targets)
    loss.backward()
    torch.save((loss.detach(), scores.grad), f"{folder}/{rank}.pt")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("sizes", "positives_of"),
    [
        ([500, 500], [True, True]),
        ([100, 700, 200], [True, True, True]),
        ([400, 600], [False, True]),
        ([300, 0], [True, True]),
        ([300, 300], [False, False]),
    ],
    ids=["halves", "three uneven", "one without positives", "one empty", "no positives at all"],
)
def test_every_process_has_the_loss_and_gradient_of_the_whole_batch(make_boxes, name, sizes, positives_of):
    parts = split_boxes(make_boxes, sizes, positives_of)
    results = run_processes(rank_part, parts, name)
    scores = torch.cat([part for part, _ in parts]).requires_grad_()
    loss = LOSSES[name]()(scores, torch.cat([target for _, target in parts]))
    loss.backward()
    for own_loss, _ in results:
        assert own_loss.item() == pytest.approx(loss.item(), abs=1e-12)
    gathered = torch.cat([gradient for _, gradient in results]) / len(parts)
    assert torch.allclose(gathered, scores.grad, rtol=1e-9, atol=1e-15)


def train_step(rank, folder, parts):
    join_group(rank, folder, parts)
    features, targets = parts[rank]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).double())
    APLoss(process_group=dist.group.WORLD)(model(features)[:, 0], targets).backward()
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")


def test_data_parallel_weights_get_the_gradient_of_one_process():
    torch.manual_seed(1)
    features = torch.randn(300, 8, dtype=torch.float64)
    targets = (torch.rand(300) < 0.1).long()
    parts = [(features[:120], targets[:120]), (features[120:], targets[120:])]
    results = run_processes(train_step, parts)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    ap_loss(model(features)[:, 0], targets).backward()
    for gradients in results:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


def meet_a_mistake(rank, folder, parts, where):
    join_group(rank, folder, parts)
    scores, targets = parts[rank]
    if rank == 1:
        if where == "shape":
            targets = targets[:-1]
        elif where == "target":
            targets[3] = 7
        else:
            scores[int((targets == (where == "positive score")).nonzero()[0])] = float("nan")
    try:
        APLoss(process_group=dist.group.WORLD)(scores, targets)
        message = "accepted"
    except ValueError as error:
        message = str(error)
    torch.save(message, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("where", ["target", "positive score", "negative score", "shape"])
def test_a_mistake_in_one_process_is_raised_in_all_and_none_waits(make_boxes, where):
    parts = split_boxes(make_boxes, [300, 300], [True, True])
    others, own = run_processes(meet_a_mistake, parts, where)
    assert "another process" in others
    assert {"target": "got 7", "shape": "same shape"}.get(where, "got nan") in own


def test_a_group_without_initialised_processes_is_refused():
    with pytest.raises(ValueError, match="init_process_group"):
        APLoss(process_group=object())(torch.zeros(3), torch.tensor([1, 0, 0]))


def rank_groups(rank, folder, parts):
    join_group(rank, folder, parts)
    scores, targets, groups = parts[rank]
    scores.requires_grad_()
    losses = [
        ap_loss(scores, targets, groups=groups, process_group=dist.group.WORLD, max_positives=limit)
        for limit in (None, 50)
    ]
    losses[0].backward()
    torch.save(([loss.item() for loss in losses], scores.grad), f"{folder}/{rank}.pt")


def test_groups_of_the_same_number_are_one_group_in_all_processes(make_boxes):
    scores, targets = make_boxes("random", 40, 460, ignored=0, dtype=torch.float64)
    groups = torch.randint(0, 7, scores.shape, generator=torch.Generator().manual_seed(0))
    parts = list(zip(*(t.split([200, 300]) for t in (scores, targets, groups)), strict=True))
    results = run_processes(rank_groups, parts)
    scores = scores.clone().requires_grad_()
    loss = ap_loss(scores, targets, groups=groups)
    loss.backward()
    for losses, _ in results:
        assert losses == pytest.approx([loss.item()] * 2, abs=1e-12)
    gathered = torch.cat([gradient for _, gradient in results]) / 2
    assert torch.allclose(gathered, scores.grad, rtol=0, atol=1e-12)

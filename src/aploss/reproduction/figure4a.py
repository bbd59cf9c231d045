"""Figure 4a: AP against training steps for the losses of Table 2, from the runs of Table 2."""

import numpy as np

from aploss.reporting.blocks import Cell, Section, Table, Text
from aploss.reporting.style import line_style, loss_label
from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import MEASURED_ON
from aploss.reproduction.request import Reproduction, Request, small_note
from aploss.reproduction.results import Results
from aploss.reproduction.table2 import SUMMARY, plan

__all__ = ["REPRODUCTION", "snapshots"]


def snapshots(results: Results) -> tuple[list[float], dict[str, list[float]]]:
    """Mean AP over seeds at the steps that all runs were measured at.

    Returns:
        The steps, and for each row its means.
    """
    curves = {
        variant.name: [variant.measure.curve(run) for run in results.finished_runs(variant.name)]
        for variant in results.plan.variants
    }
    curves = {name: found for name, found in curves.items() if found}
    every = [set(curve.steps) for found in curves.values() for curve in found]
    steps = sorted(set.intersection(*every)) if every else []
    means = {
        name: [
            float(np.mean([dict(zip(c.steps, c.values, strict=True))[step] for c in found]))
            for step in steps
        ]
        for name, found in curves.items()
    }
    return steps, means


def text(request: Request, results: Results) -> PageText:
    """At how many snapshots is AP-loss first?"""
    steps, means = snapshots(results)
    split = "validation" if request.is_small else "test"
    rows = [
        [Cell(loss_label(name), colour=line_style(name).colour), *(100 * v for v in values)]
        for name, values in means.items()
    ]
    table = Table(columns=["loss", *(f"step {step:g}" for step in steps)], rows=rows, digits=1)
    words = f"Mean AP over seeds on the {split} split, in percent."
    return PageText(
        title=REPRODUCTION.title,
        summary=f"{SUMMARY} The curves are on the {split} split, the table on the test split.",
        reference="ap",
        verdicts=[_verdict(results, means)],
        notes=small_note(request),
        paper=MEASURED_ON[request.benchmark],
        sections=[Section("Snapshots", [Text(words), table])] if steps else (),
        curve_label=f"AP on {split}",
    )


def _verdict(results: Results, means: dict[str, list[float]]) -> tuple[bool | None, str]:
    claim = "AP-loss is first at every snapshot of the second half of the training"
    if not results.complete or "ap" not in means or not means["ap"]:
        return None, claim
    others = np.array([values for name, values in means.items() if name != "ap"])
    ahead = np.array(means["ap"]) > others.max(axis=0)
    holds = bool(ahead[len(ahead) // 2 :].all())
    return holds, f"{claim}; it is first at {int(ahead.sum())} of {len(ahead)}"


REPRODUCTION = Reproduction(
    name="figure4a",
    title="Figure 4a: AP against training steps",
    shows="AP against training iterations for the losses",
    plan=plan,
    text=text,
    benchmarks=("voc", "coco"),
)

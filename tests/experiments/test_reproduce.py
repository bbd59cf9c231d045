"""From a request to runs and a page: numbers, claims, the time it takes, and the document."""

import json
import re
import shlex
from pathlib import Path

import pytest

from aploss.cli.main import make_parser
from aploss.errors import ConfigError
from aploss.experiments.paper import REPRODUCTIONS, reproduction, snapshots
from aploss.experiments.reproduce import Request, check_time, default_out, describe_reproduction, plan_for, reproduce

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "reproduction.md"


@pytest.mark.parametrize("name", ["table1a", "figure7"])
def test_a_page_has_the_papers_numbers_and_the_claims(name: str, fake_training, tmp_path: Path) -> None:
    out = tmp_path / "page"
    results = reproduce(name, Request(seeds=(0, 1)), out, command=f"aploss reproduce {name}")
    assert results.complete
    table = (out / "table.md").read_text()
    assert reproduction(name).title in table
    assert f"aploss reproduce {name}" in table
    assert "AP, paper" in table
    assert "PASCAL VOC 2007 test" in table
    for number in _numbers_of(name):
        assert f"| {100 * number:.1f} |" in table
    found = json.loads((out / "results.json").read_text())
    assert found["verdicts"]
    assert found["complete"]
    assert "0123abc" in table  # commit
    assert "- seeds: 0, 1" in table
    assert "This is the small scale" in table


def _numbers_of(name: str) -> list[float]:
    return [number for row in reproduction(name).rows for number in row.paper["voc"].values()]


def test_verdicts_of_table_2_are_the_papers_claims(fake_training, tmp_path: Path) -> None:
    # The fake trainer gives each loss its best at a rate of the grid: 0.74 for AP-loss,
    # 0.72 for CE + OHEM, 0.71 for focal, 0.55 for AUC, with the same distance for every seed.
    reproduce("table2", Request(), tmp_path / "page")
    found = json.loads((tmp_path / "page/results.json").read_text())
    assert [one["holds"] for one in found["verdicts"]] == [True] * 3
    assert found["verdicts"][0]["claim"].startswith("AP-loss is above Focal loss by at least 1: +3.0 AP")


def test_snapshots_have_every_seed(fake_training, tmp_path: Path) -> None:
    results = reproduce("figure5a", Request(seeds=(0, 1), tune=False), tmp_path / "page")
    steps, found = snapshots(results)
    assert steps == [800 * k // 10 for k in range(1, 11)]
    assert found["ap"][-1] == pytest.approx([0.73, 0.742])  # ends at 0.74 and 0.752, both minus 0.01
    (verdict,) = json.loads((tmp_path / "page/results.json").read_text())["verdicts"]
    assert verdict["holds"] is True
    assert "first at 10 of 10" in verdict["claim"]
    del results.runs["focal", 1]  # an unfinished comparison decides nothing
    assert reproduction("figure5a").verdicts(results)[0].holds is None


def test_a_page_is_there_before_the_first_run(fake_training, tmp_path: Path) -> None:
    for name in REPRODUCTIONS:
        reproduce(name, Request(), tmp_path / name, cache=tmp_path / "cache", max_minutes=0)
        assert "Not finished: 0 of" in (tmp_path / name / "report.html").read_text()
    assert fake_training.configs == []


def test_pages_have_folders_of_their_own() -> None:
    assert str(default_out("table2", Request())) == "runs/table2-small-builtin"
    assert str(default_out("table2", Request(scale="paper"))) == "runs/table2-paper-voc"


def test_settings_of_the_paper_cannot_be_changed() -> None:
    for wrong in ({"steps": 10}, {"recipe": "demo"}, {"processes": 4}):
        with pytest.raises(ConfigError):
            Request(scale="paper", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        plan_for("table1a", Request(scale="paper", benchmark="coco"))


class TestTime:
    @pytest.fixture(autouse=True)
    def fast_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aploss.experiments.plan.measure_step", lambda config, batch: (5.0, 0.5 * batch))

    def test_a_cpu_needs_consent_and_data(self) -> None:
        said: list[str] = []
        request = Request(scale="paper", data="VOCdevkit", device="cpu")
        with pytest.raises(ConfigError) as caught:
            check_time("table2", request, said.append, start_anyway=False)
        # 4 losses x 160 epochs x 16551 images x 5 s = 52,963,200 s = 613 days
        assert "4 trainings of retinanet-r50, about 613 days on this cpu" in str(caught.value)
        assert "4.0 GB" in str(caught.value)  # 8 images
        with pytest.raises(ConfigError):
            check_time("table2", Request(scale="paper", device="cpu"), said.append, start_anyway=True)
        assert said == []
        check_time("table2", request, said.append, start_anyway=True)
        assert "613 days" in said[0]
        check_time("table2", Request(device="cpu"), print, start_anyway=False)  # the small scale needs neither

    def test_runs_that_rows_share_are_counted_once(self) -> None:
        text = describe_reproduction("table3", Request(scale="paper", device="cpu"))
        assert "1 trainings of retinanet-r101" in text

    def test_the_plan_shows_settings_and_differences(self) -> None:
        text = describe_reproduction("table1b", Request(scale="paper", device="cpu"))
        assert "delta 2: criterion.options = {'delta': 2.0, 'interpolated': True}" in text
        assert "learning_rate: 0.001" in text
        assert "seeds: 0, all of them\n" in text
        assert "torchrun --nproc-per-node 2 -m aploss reproduce table1b --scale paper" in text


def test_every_command_of_the_document_is_understood() -> None:
    blocks = re.findall(r"```\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) >= 5
    for words in commands:
        name, *arguments = words[words.index("aploss") + 1 :]
        make_parser((name,)).parse_args(arguments)


def test_every_reproduction_has_a_row_with_its_length() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "| `" in line]
    names = [re.findall(r"`(\w+)`", row)[0] for row in rows]
    assert names == list(REPRODUCTIONS)
    for name, row in zip(names, rows, strict=True):
        if stated := re.search(r"(\d+) steps", row):
            config = plan_for(name, Request()).variants[0].config
            assert config.schedule.length == int(stated.group(1)), name


def test_paper_to_code_names_files_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:\w+/)+[\w*-]*(?:\.(?:py|yaml))?)(?:::(\w+))?`", text.partition("## Method")[2])
    assert len(files) > 50
    for path, test in files:
        found = [file for top in ("src/aploss", "tests") for file in ROOT.glob(f"{top}/{path}")]
        assert found, path
        assert not test or f"def {test}(" in found[0].read_text(encoding="utf-8"), test

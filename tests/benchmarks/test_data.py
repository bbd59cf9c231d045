"""The data benchmark measures every preset, the wait for data, and annotations."""

from aploss.benchmarks import data
from aploss.data.augment import PRESETS


def test_quick_run_measures_every_preset_and_number_of_workers() -> None:
    steps: list[str] = []
    result = data.run(steps.append, quick=True)
    keys = {(row["source"], row["preset"], row["workers"]) for row in result["rows"]}
    assert len(keys) == len(result["rows"]) == len(PRESETS) * 3
    assert all(row["images_per_second"] > 0 for row in result["rows"])
    assert [(row["preset"], row["workers"]) for row in result["waiting"]] == [("light", 1)]
    assert all(0 <= row["waiting_share"] < 1 for row in result["waiting"])
    loaded = result["annotations"]
    assert (loaded["images"], loaded["boxes"]) == (1200, 8600)
    assert 0 < loaded["seconds"] < 20
    if loaded["peak_gigabytes"] is not None:
        assert 0.001 < loaded["peak_gigabytes"] < 3
    assert len(steps) == 3 * len(PRESETS) + 1 + 1
    text = data.table(result)
    for words in ("shapes 128 px → 128, paper", "waiting", "8,600 boxes"):
        assert words in text

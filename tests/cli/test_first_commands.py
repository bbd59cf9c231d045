"""What a newcomer types first, wrong or half right, ends in a line with the right command."""

from pathlib import Path

import pytest

from aploss.cli.main import main


@pytest.fixture(autouse=True)
def some_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with photos and a trained run, as far as commands look at it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photo.jpg").write_bytes(b"")
    run = tmp_path / "runs/mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/last.pt").write_bytes(b"")
    (run / "config.yaml").write_text("data: photos\n")


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("train", "aploss train --data builtin"),
        ("train --data phtos", "did you mean 'photos'?"),
        ("train --data photos --loss aploss", "did you mean 'ap'?"),
        ("train --data photos --loss ohem", "did you mean 'ce-ohem'?"),
        ("train photos --batch 8", "did you mean --batch-size?"),
        ("train photos --learning-rate 1", "did you mean --optimizer.learning-rate?"),
        ("train demo", "aploss train --recipe demo --data builtin"),
        ("train runs/mine", "aploss train --resume --out runs/mine"),
        ("resume runs/mine", "aploss train --resume --out runs/mine"),
        ("--train --data photos", "aploss train --data photos"),
        ("photos", "aploss train --data photos"),
        ("photo.jpg", "aploss predict runs/mine photo.jpg --out found"),
        ("predict photo.jpg", "aploss predict runs/mine photo.jpg --out found"),
        ("predict runs/mine", "aploss predict runs/mine photos/ --out found"),
        ("predict runs/mine photo.jpg", "aploss predict runs/mine photo.jpg --out found"),
        ("detect runs/mine photo.jpg", "aploss predict runs/mine photo.jpg"),
        ("evaluate runs/mine --data photos", "aploss eval runs/mine --data photos"),
        ("test runs/mine", "aploss eval runs/mine"),
        ("eval runs/mine", "aploss eval runs/mine --data photos"),
        ("eval", "aploss eval runs/mine --data PATH"),
        ("compare ap focl", "did you mean 'focal'?"),
        ("export runs/mine", "aploss export runs/mine --out model.onnx"),
        ("data photos", "aploss data check photos"),
        ("check photos", "aploss data check photos"),
        ("reproduce", "aploss reproduce NAME"),
        ("train --data photos --model retinanet-tiny", "did you mean --detector?"),
        ("train --data photos --amp", "did you mean --precision?"),
        ("train --data photos --gpu 0", "did you mean --device?"),
        ("train --resume", "aploss train --resume --out runs/mine"),
        ("predict --source photos --out found", "aploss predict RUN IMAGES"),
        ("predict --weights runs/mine photo.jpg", "aploss predict RUN IMAGES"),
        ("predict photos runs/mine", "aploss predict runs/mine photos --out found"),
        ("eval --run runs/mine --data photos", "aploss eval RUN"),
        ("data check --path photos", "aploss data check PATH"),
        ("data convert photos", "aploss data convert photos --to FORMAT --out DIR"),
    ],
)
def test_a_half_right_command_is_met_with_the_right_one(
    capsys: pytest.CaptureFixture[str], words: str, right: str
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert right in captured.err
    assert captured.err.count("\n") == 1


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "data check" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "theory"])
    assert "usage: aploss theory" in capsys.readouterr().out

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
        ("predict --source photos --out found", "aploss predict runs/mine photos --out found"),
        ("predict --weights runs/mine photo.jpg", "aploss predict runs/mine photo.jpg --out found"),
        ("predict photos runs/mine", "aploss predict runs/mine photos --out found"),
        ("eval --run runs/mine --data photos", "aploss eval runs/mine --data photos"),
        ("data check --path photos", "aploss data check photos"),
        ("data convert photos", "aploss data convert photos --to FORMAT --out DIR"),
        # as Ultralytics has it
        ("train data=photos epochs=10", "aploss train --data photos --epochs 10"),
        ("detect train data=photos imgsz=320", "aploss train --data photos --image-size 320"),
        ("task=detect mode=train data=photos", "aploss train --data photos"),
        ("val model=runs/mine data=photos", "aploss eval runs/mine --data photos"),
        ("predict model=runs/mine source=photo.jpg conf=0.4", "aploss predict runs/mine photo.jpg --threshold 0.4 "),
        ("predict --source photo.jpg --save", "aploss predict runs/mine photo.jpg --out found"),
        ("export --format onnx runs/mine", "aploss export runs/mine --out model.onnx"),
        ("export model=runs/mine format=openvino", "aploss export runs/mine --out model.xml"),
        ("train coco.yaml", "aploss train --data builtin"),
        # short options
        ("train -d photos -e 10", "aploss train --data photos --epochs 10"),
        ("train photos -b 8 -o runs/x", "aploss train photos --batch-size 8 --out runs/x"),
        ("predict -m runs/mine -i photo.jpg", "aploss predict runs/mine photo.jpg --out found"),
        # detectron2, MMDetection, torchvision
        ("train photos --num-gpus 2", "aploss train photos --device cuda"),
        ("train --config-file my.yaml", "aploss train --config my.yaml"),
        ("train photos --eval-only", "aploss eval runs/mine --data photos"),
        ("train photos --work-dir runs/x", "aploss train photos --out runs/x"),
        ("train photos --cfg-options optimizer.weight_decay=0", "aploss train photos --optimizer.weight-decay 0"),
        (
            "predict runs/mine photo.jpg --score-thr 0.3",
            "aploss predict runs/mine photo.jpg --threshold 0.3 --out found",
        ),
        ("train --data-path photos --wd 0", "aploss train --data photos --optimizer.weight-decay 0"),
        # Hugging Face, Lightning
        ("train photos --output_dir x --num_train_epochs 3", "aploss train photos --out x --epochs 3"),
        ("train photos --per_device_train_batch_size 4 --fp16", "photos --batch-size 4 --precision float16"),
        ("train photos --trainer.max_epochs 3", "aploss train photos --epochs 3"),
        ("fit --data photos", "aploss train --data photos"),
        ("train photos --logger wandb", "aploss train photos --tracker wandb"),
        ("eval --ckpt_path runs/mine", "aploss eval runs/mine --data photos"),
        # and others
        ("predict runs/mine photo.jpg --iou 0.5", "aploss predict runs/mine photo.jpg --out found"),
        ("demo --data photos", "aploss train --recipe demo --data photos"),
        ("demo --steps 100", "aploss train --recipe demo --data builtin --steps 100"),
        ("report runs/mine", "aploss train --resume --out runs/mine"),
        ("tensorboard", "tensorboard --logdir runs/mine"),
        ("tune photos", "aploss compare --tune --data photos"),
        ("gui", "aploss app runs/mine"),
        ("val", "aploss eval runs/mine --data photos"),
        ("detect", "aploss predict runs/mine photos/ --out found"),
        ("runs/mine", "aploss predict runs/mine photos/ --out found"),
        ("resume", "aploss train --resume --out runs/mine"),
        ("train --resume runs/mine/checkpoints/last.pt", "aploss train --resume --out runs/mine"),
        ("eval runs/mine photos", "aploss eval runs/mine --data photos"),
        ("export runs/mine found.onnx", "aploss export runs/mine --out found.onnx"),
        ("compare runs/mine runs/mine", "aploss app runs/mine runs/mine"),
        ("data info photos", "aploss data check photos"),
        ("losses list", "aploss train --help"),
        ("train photos --delta 0.5", "aploss train photos --criterion.options.delta 0.5"),
        ("train photos --loss AP", "did you mean 'ap'?"),
        ("train photos --verbose", "aploss train photos"),
    ],
)
def test_a_half_right_command_is_met_with_the_right_one(
    capsys: pytest.CaptureFixture[str], words: str, right: str
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert right in captured.err
    assert captured.err.count("\n") == 1


def test_the_page_of_a_run_is_shown_the_way_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs/mine/report.html").write_text("")
    assert main(["report", "runs/mine"]) == 2
    assert "python -m webbrowser runs/mine/report.html" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train", "eval", "predict", "export", "data check", "compare"])
def test_paths_of_windows_stay_as_they_are(capsys: pytest.CaptureFixture[str], words: str) -> None:
    given = [*words.split(), *["C:\\my photos\\a=b"][: words != "compare"], "--nothing-like-it"]
    assert main(given) == 2
    assert capsys.readouterr().err.startswith(f"aploss {words}: there is no option --nothing-like-it")


def test_values_that_look_like_options_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """What follows an option is its value, and a loss has its options behind a colon."""
    assert main(["compare", "ap:delta=0.5", "--vary", "data=x", "--seeds", "-3"]) == 2
    assert "data=x: options" not in capsys.readouterr().err


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "data check" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "theory"])
    assert "usage: aploss theory" in capsys.readouterr().out

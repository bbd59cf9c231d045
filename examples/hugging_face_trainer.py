"""AP-loss in a Hugging Face detector, trained by the library's own ``Trainer``.

``pip install 'aploss[detect,hf]'``, then ``python examples/hugging_face_trainer.py``; seconds on a
CPU. The model is tiny and starts from random weights; with a network, take a pretrained one:
``RTDetrV2ForObjectDetection.from_pretrained("PekingU/rtdetr_v2_r18vd", num_labels=5,
ignore_mismatched_sizes=True)``.
"""

from typing import Any

import torch
import transformers as hf
from torchvision.ops import box_convert

from aploss import APLoss
from aploss.data import builtin_dataset
from aploss.integrations import use_loss

hf.set_seed(0)
dataset = builtin_dataset("train", counts=(16, 4, 4))


def row(index: int) -> dict[str, Any]:
    """One image as the library wants it: boxes as centre and size, relative to the image."""
    image, target = dataset[index]
    height, width = image.shape[-2:]
    scale = torch.tensor([width, height, width, height])
    boxes = box_convert(target["boxes"].float(), "xyxy", "cxcywh") / scale
    labels = {"class_labels": target["labels"], "boxes": boxes.as_subclass(torch.Tensor)}
    return {"pixel_values": image.as_subclass(torch.Tensor) / 255, "labels": labels}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    images = torch.stack([one["pixel_values"] for one in rows])
    return {"pixel_values": images, "labels": [one["labels"] for one in rows]}


backbone = {
    "model_type": "rt_detr_resnet", "layer_type": "basic", "embedding_size": 16, "depths": [1] * 4,
    "hidden_sizes": [16, 32, 64, 64], "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
model = hf.RTDetrForObjectDetection(hf.RTDetrConfig(
    backbone_config=backbone, d_model=32, encoder_hidden_dim=32, encoder_in_channels=[32, 64, 64],
    decoder_in_channels=[32] * 3, decoder_layers=2, num_queries=30, num_labels=5,
))  # fmt: skip
use_loss(model, APLoss())  # the one line

settings = hf.TrainingArguments(
    output_dir="hugging-face-run", max_steps=6, per_device_train_batch_size=4, learning_rate=1e-3,
    logging_steps=2, report_to=[], remove_unused_columns=False, disable_tqdm=True, use_cpu=True,
)  # fmt: skip
rows = [row(index) for index in range(len(dataset))]
hf.Trainer(model, settings, data_collator=collate, train_dataset=rows).train()
with torch.no_grad():
    outputs = model.eval()(pixel_values=rows[0]["pixel_values"][None])
found = hf.RTDetrImageProcessor().post_process_object_detection(outputs, threshold=0)
print(f"{len(found[0]['scores'])} detections")  # threshold=0: these scores rank, no more

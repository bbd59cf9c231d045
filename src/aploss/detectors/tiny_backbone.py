"""A ResNet small enough to train from scratch on a CPU."""

from functools import partial

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

__all__ = ["TinyResNet"]


class TinyResNet(nn.Module):
    """Four stages of one basic block each with GroupNorm, named as in torchvision's ResNet.

    Stages have strides 4, 8, 16, 32 and the channels of ``widths``.
    """

    widths = (32, 64, 128, 256)
    groups = 8

    def __init__(self) -> None:
        super().__init__()
        norm = partial(nn.GroupNorm, self.groups)
        stem = self.widths[0]
        self.conv1 = nn.Conv2d(3, stem, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm(stem)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        inputs = stem
        for stage, width in enumerate(self.widths, start=1):
            stride = 1 if stage == 1 else 2
            shortcut = None
            if stride != 1 or inputs != width:
                shortcut = nn.Sequential(
                    nn.Conv2d(inputs, width, kernel_size=1, stride=stride, bias=False), norm(width)
                )
            block = BasicBlock(inputs, width, stride, shortcut, norm_layer=norm)
            self.add_module(f"layer{stage}", nn.Sequential(block))
            inputs = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Features of the last stage, [B, 256, H / 32, W / 32]."""
        features = images
        for module in self.children():
            features = module(features)
        return features

"""RetinaNet on any model of timm that has feature maps of strides 8, 16 and 32."""

from typing import Any

from torch import Tensor, nn

from aploss.detectors.detector import DetectorConfig, Network, register_detector
from aploss.detectors.retinanet import retinanet_network
from aploss.errors import ConfigError, RunError

STRIDES = (8, 16, 32)


@register_detector("retinanet")
class TimmRetinaNet(DetectorConfig):
    """RetinaNet with P3-P7 of 256 channels on a model of timm, images normalised as this model wants."""

    backbone: str = "resnet50"  # name of a model of timm, such as ``resnet50``, ``convnext_tiny``
    frozen_norms: bool = False  # keep the loaded statistics of batch norms, as in the paper; the default with weights
    anchors_per_cell: int = 6  # 6 as in the paper, or 9

    def network(self, *, columns: int, softmax: bool) -> Network:
        body = _feature_maps(self.backbone)
        settings = body.model.pretrained_cfg
        if self.frozen_norms:
            _timm().layers.freeze_batch_norm_2d(body)
        return retinanet_network(
            body,
            columns=columns,
            softmax=softmax,
            anchors_per_cell=self.anchors_per_cell,  # type: ignore[arg-type]  # checked there
            image_mean=settings["mean"],
            image_std=settings["std"],
        )

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        return {"frozen_norms": True}

    def backbone_key(self, name: str) -> str:
        return f"backbone.body.model.{name}"

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        if name != "imagenet":
            return None
        timm = _timm()
        settings = timm.get_pretrained_cfg(self.backbone)
        if settings is None or not settings.has_weights:
            raise ConfigError(f"timm has no weights for {self.backbone}; leave weights away or name a file")
        try:
            return dict(timm.create_model(self.backbone, pretrained=True).state_dict())
        except Exception as error:  # whatever a hub raises where there is no network
            where = settings.url or f"model.safetensors of {settings.hf_hub_id}"
            raise RunError(
                f"cannot download the weights of {self.backbone} ({type(error).__name__}): on a machine without "
                f"network, fetch {where} elsewhere and name the file as weights"
            ) from None


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise ConfigError("the detector 'retinanet' needs timm: pip install timm") from None
    return timm


def _feature_maps(name: str) -> Any:
    """The model with its maps of strides 8, 16 and 32 as a list; names of its weights stay, below ``model``."""
    timm = _timm()
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('.')[0]}*")[:3]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"timm has no model {name!r}{hint}")
    options: dict[str, Any] = {"pretrained": False, "features_only": True, "feature_cls": "getter"}
    if "swin" in name:
        options["strict_img_size"] = False
    try:
        reductions = timm.create_model(name, **options).feature_info
        levels = dict(zip(reductions.reduction(), reductions.out_indices, strict=True))
        if not set(STRIDES) <= set(levels):
            raise ConfigError(f"{name} has feature maps of strides {sorted(levels)}, RetinaNet needs 8, 16 and 32")
        body: nn.Module = timm.create_model(name, out_indices=[levels[stride] for stride in STRIDES], **options)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} of timm gives no feature maps: {error}") from error
    return body

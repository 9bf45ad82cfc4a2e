"""Yours: the model."""

from torch import Tensor, nn

from .settings import ModelConfig


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.channels
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(8 * width, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (B, 10) of images (B, 8, 8)."""
        scores: Tensor = self.layers(images.unsqueeze(1))
        return scores


def build_model(config: ModelConfig) -> nn.Module:
    """The model that is trained."""
    return Net(config)

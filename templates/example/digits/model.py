"""Yours: the model. Plain torch.nn: nothing here knows how many processes train it.

Shapes: B samples, C channels, H rows and W columns of an image.
"""

from torch import Tensor, nn

from .settings import ModelConfig


class DigitNet(nn.Module):
    """A small convolutional network for 8x8 images.

    GroupNorm rather than BatchNorm: its result does not depend on how a batch is cut.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.channels
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(config.dropout),
            nn.Linear(2 * width * 2 * 2, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (B, 10) of images (B, 1, 8, 8)."""
        scores: Tensor = self.head(self.features(images))
        return scores


def build_model(config: ModelConfig) -> nn.Module:
    """The model that is trained. Every rank builds it under the same seed."""
    return DigitNet(config)

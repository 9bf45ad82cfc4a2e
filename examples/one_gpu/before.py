"""Train a small network on the digits of scikit-learn, on one GPU: a script as there are many."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 5
BATCH_SIZE = 64
LR = 3e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of 8x8 pixels and their labels; every fifth one is for validation."""

    def __init__(self, is_train: bool) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.images)) % 5 == 0) != is_train
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen] / 16
        self.labels = torch.tensor(digits.target, dtype=torch.int64)[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (B, 10) of images (B, 8, 8)."""
        scores: Tensor = self.layers(images.unsqueeze(1))
        return scores


def train() -> None:
    """Train, evaluate after each epoch, save the weights."""
    torch.manual_seed(0)
    train_loader = DataLoader(Digits(is_train=True), batch_size=BATCH_SIZE, shuffle=True)
    valid_loader = DataLoader(Digits(is_train=False), batch_size=BATCH_SIZE)
    model = Net().to(DEVICE, DTYPE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    for epoch in range(1, EPOCHS + 1):
        model.train()
        for images, labels in train_loader:
            scores = model(images.to(DEVICE, DTYPE))
            loss = criterion(scores, labels.to(DEVICE))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        total_loss, correct, count = 0.0, 0, 0
        with torch.no_grad():
            for images, labels in valid_loader:
                scores = model(images.to(DEVICE, DTYPE))
                total_loss += criterion(scores, labels.to(DEVICE)).item() * len(labels)
                correct += int((scores.argmax(dim=1).cpu() == labels).sum())
                count += len(labels)
        print(f"epoch {epoch}: loss {total_loss / count:.10g}, accuracy {correct / count:.4f}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    train()

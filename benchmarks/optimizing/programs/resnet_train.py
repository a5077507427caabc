"""Train a ResNet-50 on random images with a GradScaler, as scripts for ImageNet do."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="channels_last, torch.compile, fused optimiser"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            conv = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + identity)


def resnet(blocks, width, classes):
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
blocks, width, size, batch, every = (
    ([1, 1], 8, 32, 4, 5) if options.tiny else ([3, 4, 6, 3], 64, 224, 64, 10)
)
model = resnet(blocks, width, 1000).to(device)
images = torch.randn(4, batch, 3, size, size, device=device)
labels = torch.randint(0, 1000, (4, batch), device=device)
if options.best:
    torch.backends.cudnn.benchmark = True
    model = model.to(memory_format=torch.channels_last)
    model = torch.compile(model, mode="reduce-overhead" if options.best == "graphs" else "default")
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, fused=True if options.best else None
)
scaler = torch.amp.GradScaler(device)
for step in range(options.steps):
    batch_images = images[step % 4]
    if options.best:
        batch_images = batch_images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        loss = criterion(model(batch_images), labels[step % 4])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

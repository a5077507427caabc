"""Train a DCGAN on random images, with two optimisers."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument(
    "--best",
    choices=["default", "graphs"],
    help="torch.compile, fused optimisers, one CUDA graph of a step",
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


def generator(latent, width):
    layers, sizes = [], [8 * width, 4 * width, 2 * width, width]
    layers += [
        nn.ConvTranspose2d(latent, sizes[0], 4, 1, 0, bias=False),
        nn.BatchNorm2d(sizes[0]),
        nn.ReLU(True),
    ]
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [
            nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width):
    layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for inputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inputs, 2 * inputs, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * inputs)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
graphs = options.best == "graphs" and device == "cuda"
latent, width, batch, every = (16, 8, 4, 5) if options.tiny else (100, 64, 128, 20)
maker, critic = generator(latent, width).to(device), discriminator(width).to(device)
settings = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True if options.best else None}
maker_optimizer = torch.optim.Adam(maker.parameters(), **settings, capturable=graphs)
critic_optimizer = torch.optim.Adam(critic.parameters(), **settings, capturable=graphs)
criterion = nn.BCEWithLogitsLoss()
if options.best:
    torch.backends.cudnn.benchmark = True
    maker = torch.compile(maker, dynamic=False)
    critic = torch.compile(critic, dynamic=False)

real, fake = torch.ones(batch, device=device), torch.zeros(batch, device=device)
images = torch.rand(4, batch, 3, 64, 64, device=device) * 2 - 1


def train(images):
    critic.zero_grad()
    loss_real = criterion(critic(images), real)
    loss_real.backward()
    made = maker(torch.randn(batch, latent, 1, 1, device=device))
    loss_fake = criterion(critic(made.detach()), fake)
    loss_fake.backward()
    critic_optimizer.step()
    maker.zero_grad()
    loss = criterion(critic(made), real)
    loss.backward()
    maker_optimizer.step()
    return loss


if graphs:  # of the whole step, since gradients of two losses are added up in it
    current, stream = images[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(11):
            train(current)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(current).detach()
for step in range(options.steps):
    if graphs:
        current.copy_(images[step % 4])
        graph.replay()
    else:
        loss = train(images[step % 4])
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

"""Train a DCGAN on random images, with two optimisers."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--best", action="store_true", help="torch.compile, fused optimisers")
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
latent, width, batch, every = (16, 8, 4, 5) if options.tiny else (100, 64, 128, 20)
maker, critic = generator(latent, width).to(device), discriminator(width).to(device)
fused = True if options.best else None
maker_optimizer = torch.optim.Adam(maker.parameters(), 2e-4, betas=(0.5, 0.999), fused=fused)
critic_optimizer = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999), fused=fused)
criterion = nn.BCEWithLogitsLoss()
if options.best:
    torch.backends.cudnn.benchmark = True
    maker.compile()
    critic.compile()

real, fake = torch.ones(batch, device=device), torch.zeros(batch, device=device)
images = torch.rand(4, batch, 3, 64, 64, device=device) * 2 - 1
for step in range(options.steps):
    critic.zero_grad()
    loss_real = criterion(critic(images[step % 4]), real)
    loss_real.backward()
    made = maker(torch.randn(batch, latent, 1, 1, device=device))
    loss_fake = criterion(critic(made.detach()), fake)
    loss_fake.backward()
    critic_optimizer.step()
    maker.zero_grad()
    loss = criterion(critic(made), real)
    loss.backward()
    maker_optimizer.step()
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

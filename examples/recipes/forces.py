"""A network learns an energy from energies and forces, which are its gradient with respect to positions."""

import torch
from torch import Tensor, nn

from examples.recipes.recipe import Recipe, compare


def morse(positions: Tensor) -> Tensor:
    """The energy of three atoms in a plane, positions (..., 6), as a sum of Morse potentials."""
    atoms = positions.unflatten(-1, (3, 2))
    distances = torch.stack([(atoms[..., i, :] - atoms[..., j, :]).norm(dim=-1) for i, j in ((0, 1), (0, 2), (1, 2))])
    return (1 - torch.exp(-(distances - 1.0))).square().sum(0)


class Forces(Recipe):
    """Energies and forces: a loss on a gradient with respect to inputs."""

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.modules = [self.model]
        self.run = self.way(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = self.way.scaler(init_scale=2.0**8)

    def step(self) -> Tensor:
        corners = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.5, 0.9])
        positions = (corners + 0.2 * torch.randn(64, 6, generator=self.random)).requires_grad_()
        true_energy = morse(positions)
        (true_slope,) = torch.autograd.grad(true_energy.sum(), positions)
        self.optimizer.zero_grad()
        energy = self.run(positions).squeeze(-1).float()
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        loss = (energy - true_energy.detach()).square().mean() + 0.1 * (slope - true_slope).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


if __name__ == "__main__":
    compare(Forces)

"""A plain PyTorch loop that trains a block drafter on a small frozen target: what an adapter is written for."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, B, MASK = 200, 48, 4, 199  # vocabulary, width, block size, mask token
GAMMA = 4.0


class Target(nn.Module):
    """A frozen stand-in for a language model: four causal layers, a final norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(V, D, generator=generator))
        self.mix = nn.Parameter(torch.randn(4, 2 * D, D, generator=generator) / (2 * D) ** 0.5)
        self.head = nn.Parameter(torch.randn(V, D, generator=generator) / D**0.5)
        self.requires_grad_(False)

    def states(self, tokens: Tensor) -> Tensor:
        """[S] -> [S, 5, D]: the outputs of layers 0 to 3, then the last one after the final norm."""
        x, past = self.embed[tokens], []
        age = torch.arange(len(tokens))
        decay = (0.7 ** (age[:, None] - age)).tril()
        for mix in self.mix:
            x = x + torch.tanh(torch.cat((x, decay @ x), -1) @ mix)
            past.append(x)
        return torch.stack([*past, F.rms_norm(x, (D,))], 1)


class Drafter(nn.Module):
    """fc over three conditioning layers, then one attention layer from the block's slots to the context."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(3 * D, D, bias=False)
        self.slot = nn.Parameter(torch.randn(B, D))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))

    def forward(self, states: Tensor, block: Tensor, seen: Tensor, distance: Tensor) -> Tensor:
        """states [S, 3 D], block [A, B, D]; seen and distance [A, S] say what each anchor may look at."""
        context, x = F.rms_norm(self.fc(states), (D,)), block + self.slot
        keys = torch.cat((context.expand(len(x), -1, -1), x), 1)
        scores = self.q(x) @ self.k(keys).transpose(1, 2) / D**0.5
        own = torch.zeros(len(x), B)
        bias = torch.cat(((-0.1 * distance).masked_fill(~seen, float("-inf")), own), 1)
        x = x + self.o((scores + bias[:, None]).softmax(-1) @ self.v(keys))
        return F.rms_norm(x + self.mlp(x), (D,))


def step(drafter: Drafter, target: Target, captured: Tensor, batch: dict, anchors: Tensor) -> dict:
    """One step: captured [S, 5, D] as `Target.states` gives them -> the loss and what it was made from."""
    tokens, mask, document = batch["tokens"], batch["mask"], batch["document"]
    fc_input = captured[:, :3].flatten(1)
    place = torch.arange(len(tokens))
    seen = (place < anchors[:, None]) & (document == document[anchors][:, None])
    ids = torch.full((len(anchors), B), MASK)
    ids[:, 0] = tokens[anchors]
    hidden = drafter(fc_input, target.embed[ids], seen, (anchors[:, None] - place).clamp(min=0))

    index = anchors[:, None] + torch.arange(B)
    inside = (index < len(tokens)) & (
        document[index.clamp(max=len(tokens) - 1)] == document[anchors][:, None]
    )
    index = index.clamp(max=len(tokens) - 1)
    trained = inside & mask[index]
    trained[:, 0] = False
    labels = (captured[index - 1, 4] @ target.head.T).argmax(-1)  # the target's own choice for the slot
    weights = trained * torch.exp(-(torch.arange(B) - 1.0) / GAMMA)
    each = F.cross_entropy((hidden @ target.head.T).flatten(0, 1), labels.flatten(), reduction="none")
    loss = (each.view(weights.shape) * weights).sum() / weights.sum()
    return {"loss": loss, "hidden": hidden, "fc_input": fc_input, "labels": labels.where(trained, -1)}


def train(steps: int = 50) -> float:
    """Train on random walks over the vocabulary; returns the last loss."""
    drafter, target = Drafter(), Target()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, MASK, (96,), generator=generator)
        batch = {"tokens": tokens, "mask": torch.ones(96).bool(), "document": torch.arange(96) // 48}
        captured = torch.cat([target.states(tokens[:48]), target.states(tokens[48:])])
        anchors = torch.randperm(90, generator=generator)[:12].sort().values
        optimizer.zero_grad()
        out = step(drafter, target, captured, batch, anchors)
        out["loss"].backward()
        optimizer.step()
    return out["loss"].item()


if __name__ == "__main__":
    print(f"loss {train():.3f}")

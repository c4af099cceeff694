"""Shows the step of loop.py to parity: `parity check recipe.yaml --adapter adapter.py:Plain`."""

import torch
from loop import Drafter, Target, step

from parity.probes.adapters.base import Adapter, Reference, Shown


class Plain(Adapter):
    name = "plain loop"
    slices = ("layer.0.out", "layer.1.out", "layer.2.out", "layer.3.out", "final.postnorm")
    width, vocabulary = 48, 200

    def __init__(self, recipe):
        super().__init__(recipe)
        self.target, self.drafter = Target(), Drafter()
        self.adam = torch.optim.AdamW(self.drafter.parameters(), lr=2e-3)

    def step(self, batch, states, *, anchors, seed, training):
        """The loop's own step; nothing in it is random, so the seed goes unused."""
        row = {"tokens": batch.tokens, "mask": batch.loss_mask, "document": batch.document}
        out = step(self.drafter, self.target, states, row, anchors)
        return Shown(
            loss=out["loss"],
            hidden=out["hidden"],
            head=self.target.head,
            anchors=anchors,
            fc_input=out["fc_input"],
            labels=out["labels"],
        )

    def parameters(self):
        shared = {"embed_tokens.weight": self.target.embed, "lm_head.weight": self.target.head}
        return dict(self.drafter.named_parameters()) | shared

    # What follows is optional: each method lets more be asked.

    def capture(self, batch):
        states = torch.zeros(len(batch.tokens), len(self.slices), self.width)
        for _, span in batch.spans():
            states[span] = self.target.states(batch.tokens[span])
        return states

    def reference(self, batch):
        states = self.capture(batch)
        taps = {name: states[:, index] for index, name in enumerate(self.slices)}
        taps["final.prenorm"] = taps["layer.3.out"]
        logits = taps["final.postnorm"] @ self.target.head.T
        return Reference(embed=self.target.embed, head=self.target.head, states=taps, logits=logits)

    def optimizer(self):
        return self.adam

    def update(self, batch, states, *, anchors, seed):
        self.adam.zero_grad()
        self.step(batch, states, anchors=anchors, seed=seed, training=True).loss.backward()
        self.adam.step()

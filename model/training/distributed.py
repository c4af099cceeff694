"""Ranks under torchrun: what they sum, and how they share the drafter.

    torchrun --nproc-per-node 2 -m parity train recipe.yaml --out run

The rows of a step are dealt to the ranks. Each rank adds up the gradient of its numerators; gradients and
denominators are summed over ranks and divided once, so that any number of ranks computes the step that one
would, up to the order of sums. `ddp`: every rank holds the drafter, gradients are summed in buckets after the
last forward pass. `fsdp2`: parameters, gradients and moments are sharded by torch's `fully_shard`.
"""

import os
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 1 << 24
"""Numbers summed in one call: large enough to hide latency, small enough to copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor of any shape, the same on every rank."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over ranks."""
        if self.world == 1:
            return
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(each.numel() for each in bucket) >= BUCKET:
                _sum_bucket(bucket)
                bucket = []
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([each.reshape(-1) for each in gradients])
    dist.all_reduce(flat)
    for own, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        own.copy_(part.view_as(own))


def join(device: str) -> Ranks:
    """This process's rank; joins the group that torchrun's environment describes, if any."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    return Ranks(rank=dist.get_rank(), world=world)


def leave(*, together: bool = False) -> None:
    """Leave the group, if one was joined. together: wait for the others first, as at the end of a run, so that none
    finds its connection closed; not after an error, when they may never come.

    A gloo worker lets go of a collective's tensors after it has reported it done, and needs Python for that. One that
    is still at it when Python shuts down ends the process with SIGABRT, "terminate called without an active exception"
    (torch 2.13: 5 of 60 short runs on shared cores; a barrier behind the last collective makes it likelier, since
    it holds on to what was in progress). Destroying the group would join the workers, but torch keeps the group of
    every sharded tensor alive. So the workers are waited for.
    """
    if dist.is_initialized():
        if together:
            dist.barrier()
        dist.destroy_process_group()
        _let_threads_rest()


RESTING = "SItTZX"
"""States of a thread in /proc that is neither running nor about to (R), nor on its way to (D)."""


def _let_threads_rest(most: float = 10.0) -> None:
    """Wait until no other thread of this process has anything to do, `most` seconds at most.

    All resting once is not enough: one may wait for Python, which this thread holds while it looks. It would be
    running after a sleep, which gives Python away, so two looks with a sleep between them are.
    """
    tasks, rested = Path("/proc/self/task"), 0
    if not tasks.is_dir():
        time.sleep(0.2)
        return
    end = time.monotonic() + most
    while rested < 2 and time.monotonic() < end:
        time.sleep(0.005)
        states = [_state(task) for task in tasks.iterdir() if int(task.name) != threading.get_native_id()]
        rested = rested + 1 if all(state in RESTING for state in states) else 0


def _state(task: Path) -> str:
    """The state of a thread, one letter; X where it has ended."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def local_device(device: str) -> str:
    """`cuda` under torchrun is this rank's own GPU."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Shard a drafter in place over all ranks.

    In one group: context keys are made by methods of the layers before the layers themselves run, where torch
    would not have gathered a layer's parameters that were sharded by themselves.
    """
    from torch.distributed.fsdp import fully_shard

    if ranks.world > 1:
        # Its output is a view, as torch remarks in every run; nobody changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        fully_shard(module)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (every rank must take part); any other as it is."""
    gather: Any = getattr(tensor, "full_tensor", None)
    gathered: Tensor = tensor if gather is None else gather()
    return gathered.detach()


def shard_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor on the pattern's device, sharded as the pattern is."""
    moved = tensor.to(pattern.device)
    mesh: Any = getattr(pattern, "device_mesh", None)
    if mesh is None:
        return moved
    from torch.distributed.tensor import distribute_tensor

    placements: Any = getattr(pattern, "placements", None)
    return distribute_tensor(moved, mesh, placements)

"""Where a step gets the target's states from, and the parts of the target that a drafter shares.

    parts, source, tokenizer = open_target(training)
    captured = source(batch)                       # states [S, N, D], slices named by `captured.taps`

Online: the target runs in this process, one document at a time, so that no linear-attention state crosses from
one document into the next, with the proof of who computed it. Offline: our traces, or the hs_*.safetensors of
speculators. The slices are the conditioning layers in the order of fc, then the teacher state where the recipe
needs one.

Shapes: S tokens of a row, T of a document, N captured slices, D width, V vocabulary.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.recipe.check import check_layers
from parity.model.recipe.config import Recipe, TrainingFile
from parity.model.target.backends import Backend, isolate, parse_backend
from parity.model.target.forward import forward
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec, TraceOptions
from parity.model.target.spec import source as found_at
from parity.model.tiny import embedded
from parity.model.training.data import Batch, Document
from parity.tracing.trace import Trace

TEACHER_FINAL = {"pre": "final.prenorm", "post": "final.postnorm"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepStates:
    """What a step starts from."""

    states: Tensor
    """[S, N, D], as computed: never converted."""
    taps: tuple[str, ...]
    """Name of each slice: the conditioning layers in the order of fc, then the teacher's."""
    conditioning: int
    """How many of the slices are fed to fc."""


class StateSource(Protocol):
    """Gives the captured states of a row."""

    def __call__(self, batch: Batch) -> StepStates: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedModules:
    """What the drafter shares with the target, frozen, and what it takes its sizes from."""

    embed: Tensor
    """[V, D] raw rows."""
    head: Tensor
    """[V, D]."""
    norm: nn.Module
    """The final norm, for teacher states taken before it."""
    layers: int
    config: Any
    """The text model's configuration."""
    target: Target | None = None
    """The whole target where it is loaded."""
    stand_in: "SyntheticTarget | None" = None
    """The stand-in that these are the parts of."""

    @property
    def speaker(self) -> "Target | SyntheticTarget":
        """What the draft-verify loop runs on. Raises ParityError where only parts are loaded."""
        found = self.target if self.target is not None else self.stand_in
        if found is None:
            do = "train on a model that transformers loads"
            raise ParityError("a target that writes text", "no target in this process", do)
        return found

    @classmethod
    def of(cls, target: Target) -> "SharedModules":
        """Those of a loaded target. Raises ParityError where it has no head, or one with a bias."""
        ends = EmbeddingAndHead.of(target)
        return cls(
            embed=ends.embed,
            head=ends.head,
            norm=target.norm,
            layers=len(target.layers),
            config=target.config,
            target=target,
        )


def taps_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the slices that a step of this recipe needs, in order."""
    taps = [f"layer.{layer}.out" for layer in recipe.conditioning.decoder_layers]
    teacher = recipe.teacher
    if recipe.needs_teacher and teacher is not None:
        final = teacher.state == "final"
        state = teacher.state if isinstance(teacher.state, int) else 0
        layer = recipe.conditioning.layer_of(state)
        taps.append(TEACHER_FINAL[teacher.norm] if final else f"layer.{layer}.out")
    return tuple(taps)


def _join_documents(batch: Batch, recipe: Recipe, documents: Sequence[Tensor]) -> StepStates:
    """Documents' states [T, N, D] one after the other, zeros on padding."""
    states = torch.cat(list(documents))
    padding = len(batch.tokens) - len(states)
    if padding:
        states = torch.cat((states, states.new_zeros(padding, *states.shape[1:])))
    taps = taps_of(recipe)
    conditioning = len(recipe.conditioning.layers)
    return StepStates(states=states.to(batch.tokens.device), taps=taps, conditioning=conditioning)


class OnlineStates:
    """The target in this process, one document at a time; the first ones are kept for later epochs."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        backend: Backend,
        problems: Sequence[str] = (),
        *,
        keep_mib: int = 0,
    ) -> None:
        self.recipe, self.target, self.backend, self.problems = recipe, target, backend, tuple(problems)
        self.taps = taps_of(recipe)
        self._room, self._kept = keep_mib << 20, dict[bytes, Tensor]()

    def __call__(self, batch: Batch) -> StepStates:
        """Raises ParityError where another backend than the recipe's computed the linear layers."""
        return _join_documents(
            batch, self.recipe, [self.document(batch.tokens[span]) for _, span in batch.spans()]
        )

    def document(self, tokens: Tensor) -> Tensor:
        """States [T, N, D] of one document."""
        key = tokens.cpu().numpy().tobytes()
        if key in self._kept:
            return self._kept[key]
        states = self._compute_states(tokens.tolist())
        size = states.numel() * states.element_size()
        if size <= self._room:
            self._room -= size
            self._kept[key] = states
        return states

    def _compute_states(self, ids: list[int]) -> Tensor:
        names = list(dict.fromkeys(self.taps))
        made = forward(self.target, ids, backend=self.backend, taps=names, problems=self.problems)
        if not made.proof.valid:
            asked = f"recipe.target.backend: {self.backend.name}"
            do = "name the backend that runs here, or install what the recipe asks for"
            raise ParityError(asked, "; ".join(made.proof.problems), do)
        return torch.stack([made.taps[name] for name in self.taps], dim=1)


class TraceStates:
    """Our traces: a document is found by its tokens, of which it may be the first part of a request."""

    def __init__(self, recipe: Recipe, trace: Trace) -> None:
        self.recipe, self.trace, self.taps = recipe, trace, taps_of(recipe)
        for name in self.taps:
            trace.tap(name)
        if not trace.manifest.backend.valid:
            found = "; ".join(trace.manifest.backend.problems)
            raise ParityError(f"states from {trace.path}", found, "capture it again on the backend asked for")
        if trace.manifest.mode.endswith("+local"):
            found = "a trace of local errors: its layers were fed another trace's states"
            raise ParityError(f"states from {trace.path}", found, "use a plain capture")
        self._whole = {entry.token_ids: entry.id for entry in trace.requests}

    def __call__(self, batch: Batch) -> StepStates:
        """Raises ParityError for a document that the trace does not hold."""
        documents = []
        for sample, span in batch.spans():
            ids = tuple(batch.tokens[span].tolist())
            request = self._whole.get(ids) or self._longer(ids)
            if request is None:
                found, do = "no request with its tokens", "capture the states of this data, cut as it is here"
                raise ParityError(f"states of sample {sample} from {self.trace.path}", found, do)
            slices = [self.trace.tensor(request, name)[: len(ids)] for name in self.taps]
            documents.append(torch.stack(slices, dim=1))
        return _join_documents(batch, self.recipe, documents)

    def _longer(self, ids: tuple[int, ...]) -> str | None:
        """A request that begins with these tokens: states do not depend on what follows."""
        return next((name for whole, name in self._whole.items() if whole[: len(ids)] == ids), None)


class SpeculatorsStates:
    """speculators' hs_{row}.safetensors: token_ids [T] and hidden_states [T, L + 1, D], the last slice being the
    final layer's output before the final norm."""

    def __init__(self, recipe: Recipe, folder: Path, parts: SharedModules) -> None:
        self.recipe, self.folder, self.parts = recipe, folder, parts
        self.conditioning = len(recipe.conditioning.layers)
        if not folder.is_dir() or not any(folder.glob("hs_*.safetensors")):
            raise ParityError(f"states from {folder}", "no hs_*.safetensors there", "correct run.states.path")
        if recipe.teacher is not None and recipe.needs_teacher and recipe.teacher.state != "final":
            found = "such files hold the conditioning layers and the final state only"
            raise ParityError(f"recipe.teacher.state: {recipe.teacher.state}", found, "write state: final")

    def __call__(self, batch: Batch) -> StepStates:
        """Raises ParityError for a file that is missing, or of other tokens or layers."""
        documents = [self._document(sample, batch.tokens[span]) for sample, span in batch.spans()]
        return _join_documents(batch, self.recipe, documents)

    def _document(self, sample: int, tokens: Tensor) -> Tensor:
        from safetensors import safe_open

        file = self.folder / f"hs_{sample}.safetensors"
        asked = f"states of sample {sample} from {file}"
        try:
            with safe_open(file, framework="pt") as opened:
                ids: Tensor = opened.get_tensor("token_ids")
                states: Tensor = opened.get_tensor("hidden_states")
        except Exception as error:  # safetensors has its own exceptions beside OSError
            raise ParityError(asked, str(error), "make the states again") from error
        if ids.dim() != 1 or not torch.equal(ids[: len(tokens)].long(), tokens.cpu()):
            raise ParityError(asked, "other token ids than the data", "make the states from this data")
        if states.shape[:2] != (len(ids), self.conditioning + 1) or states.dim() != 3:
            found = f"hidden_states {list(states.shape)} for {len(ids)} tokens"
            do = f"give [T, {self.conditioning + 1}, D]: the conditioning layers, then the final state"
            raise ParityError(asked, found, do)
        states = states[: len(tokens)]
        if not self.recipe.needs_teacher:
            return states[:, :-1]
        if self.recipe.teacher is not None and self.recipe.teacher.norm == "post":
            with torch.no_grad():
                last = self.parts.norm(states[:, -1:].to(self.parts.head)).to(states)
            return torch.cat((states[:, :-1], last), dim=1)
        return states


SYNTHETIC = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": len(embedded.VOCABULARY)}


class SyntheticTarget(nn.Module):
    """A seeded stand-in without transformers: causal, different in every layer, milliseconds a row.

    Layer i's state at t mixes the embedding at t with a decaying sum over the document before it.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        width, layers = SYNTHETIC["hidden_size"], SYNTHETIC["num_hidden_layers"]
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype), requires_grad=False)

        self.embed = random(SYNTHETIC["vocab_size"], width)
        self.head = random(SYNTHETIC["vocab_size"], width)
        self.head.data *= (
            1.5 * width**-0.5
        )  # logits with a standard deviation of 1.5: a teacher that is not sure
        self.mix = random(layers, 2 * width, width)
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=dtype).requires_grad_(False)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Every tap that a recipe can name, [T, D], from tokens [T]."""
        state, taps = self.embed[tokens], {}
        age = torch.arange(len(tokens), device=tokens.device)
        decay = (0.7 ** (age[:, None] - age).to(state.dtype)).tril()
        for index, mix in enumerate(self.mix):
            both = torch.cat((state, decay @ state), dim=-1)
            state = state + torch.tanh(both @ mix / both.shape[-1] ** 0.5)
            taps[f"layer.{index}.out"] = state
        normed: Tensor = self.norm(state)
        return taps | {"final.prenorm": state, "final.postnorm": normed}

    @property
    def ends(self) -> EmbeddingAndHead:
        """Embedding and head, as the draft-verify loop takes them."""
        return EmbeddingAndHead(embed=self.embed.detach(), head=self.head.detach())

    def session(self, layers: Sequence[int], rollback: str = "restore") -> "SyntheticSession":
        """A text to be written; `rollback` makes no difference without a cache."""
        del rollback
        return SyntheticSession(self, layers)


class SyntheticSession:
    """The stand-in in the draft-verify loop: without a cache, the whole text is computed at every `feed`."""

    def __init__(self, target: SyntheticTarget, layers: Sequence[int]) -> None:
        self.target, self.names = target, [f"layer.{layer}.out" for layer in layers]
        self.tokens = torch.empty(0, dtype=torch.long, device=target.embed.device)
        self.fed = 0

    def feed(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Logits [n, V] (of the last token alone where asked) and conditioning states [n, C * D] of ids [n]."""
        self.tokens, self.fed = torch.cat((self.tokens, ids)), len(ids)
        taps = {name: value[-len(ids) :] for name, value in self.target(self.tokens).items()}
        normed = taps["final.postnorm"][-1:] if last_only else taps["final.postnorm"]
        return normed @ self.target.head.T, torch.cat([taps[name] for name in self.names], dim=-1)

    def keep(self, count: int) -> None:
        """Keep the first `count` of the tokens fed last."""
        self.tokens = self.tokens[: len(self.tokens) - self.fed + count]


class SyntheticStates:
    """States of the synthetic target."""

    def __init__(self, recipe: Recipe, target: SyntheticTarget) -> None:
        self.recipe, self.target, self.taps = recipe, target, taps_of(recipe)

    def __call__(self, batch: Batch) -> StepStates:
        documents = []
        for _, span in batch.spans():
            made = self.target(batch.tokens[span])
            documents.append(torch.stack([made[name] for name in self.taps], dim=1))
        return _join_documents(batch, self.recipe, documents)


def open_target(training: TrainingFile) -> tuple[SharedModules, StateSource, Any]:
    """The target's parts, the state source and the tokenizer that a training file asks for.

    Raises ParityError where something is missing, or where layers are named that the target lacks.
    """
    recipe, run = training.recipe, training.run
    if recipe.target.model.startswith("synthetic:"):
        return (*synthetic(training), embedded.tokenizer())
    backend = parse_backend(recipe.target.backend)
    problems = isolate(backend) if "transformers" not in sys.modules else ()
    target = load_target(target_spec(recipe, run.device))
    parts = SharedModules.of(target)
    check_layers(recipe, parts.layers)
    source = _offline(training, parts)
    if source is None:
        source = OnlineStates(recipe, target, backend, problems, keep_mib=run.states.keep_mib)
    return parts, source, tokenizer_of(recipe)


def _offline(training: TrainingFile, parts: SharedModules) -> StateSource | None:
    """States from files, or None where the target is to compute them."""
    recipe, states = training.recipe, training.run.states
    if states.kind == "trace":
        return TraceStates(recipe, Trace.open(states.path or ""))
    return SpeculatorsStates(recipe, Path(states.path or ""), parts) if states.kind == "speculators" else None


def target_spec(recipe: Recipe, device: str = "cpu") -> TargetSpec:
    """How the recipe's target is loaded."""
    target = recipe.target
    return TargetSpec(
        model=target.model,
        revision=target.revision,
        dtype=target.dtype,
        loader=target.loader,
        device_map=None if device == "cpu" else device,
    )


def tokenizer_of(recipe: Recipe) -> Any:
    """The target's tokenizer. Raises ParityError where it has none."""
    from transformers import AutoTokenizer

    name, options = found_at(recipe.target.model)
    try:
        return AutoTokenizer.from_pretrained(name, revision=recipe.target.revision, **options)
    except (OSError, ValueError, KeyError) as error:
        found = str(error).strip().splitlines()[0]
        asked = f"the tokenizer of {recipe.target.model}"
        raise ParityError(asked, found, "check recipe.target.model") from error


def synthetic(training: TrainingFile) -> tuple[SharedModules, StateSource]:
    """Parts and states of the stand-in `synthetic:unit`. Raises ParityError for another name."""
    recipe, run = training.recipe, training.run
    if recipe.target.model != "synthetic:unit":
        raise ParityError(
            f"recipe.target.model: {recipe.target.model}", "the only one is synthetic:unit", "use that"
        )
    dtype = torch.float32 if recipe.target.dtype == "auto" else getattr(torch, recipe.target.dtype)
    target = SyntheticTarget(dtype).to(run.device)
    sizes = {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = SimpleNamespace(**SYNTHETIC, **sizes, rms_norm_eps=1e-6)
    config.to_dict = lambda: {"rope_theta": 10_000.0}
    layers = SYNTHETIC["num_hidden_layers"]
    check_layers(recipe, layers)
    ends = {"embed": target.embed, "head": target.head, "norm": target.norm}
    parts = SharedModules(**ends, layers=layers, config=config, stand_in=target)  # type: ignore[arg-type]
    return parts, _offline(training, parts) or SyntheticStates(recipe, target)


def store(
    target: Target,
    backend: Backend,
    documents: Sequence[Document],
    out: Path,
    recipe: Recipe,
) -> Trace:
    """Capture the states that `recipe` needs of all documents as a trace, to train from offline. Resumable."""
    from parity.model.target.capture import capture

    requests = [
        {
            "id": f"sample-{document.sample_id}",
            "token_ids": document.tokens.tolist(),
            "origin": "given",
            "prompt_tokens": int(document.mask.argmax()),
            "token_texts": [str(token) for token in document.tokens.tolist()],
        }
        for document in documents
    ]
    options = TraceOptions(taps=tuple(dict.fromkeys(taps_of(recipe))))
    text = json.dumps([recipe.hash, [[request["id"], request["token_ids"]] for request in requests]])
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    capture(target, requests, out, options, backend=backend, fingerprint=fingerprint)
    return Trace.open(out)

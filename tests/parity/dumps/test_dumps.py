"""Dumps of other tools: each format reads to the numbers that were written, and what is wrong is told in words."""

import gzip
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parity.cli import main as cli
from parity.dumps.files import FileLimits, files_below, open_file
from parity.dumps.mapping import Mapping, SideMap
from parity.dumps.pair import DumpTrace, open_pair
from parity.errors import NothingComparable, ParityError
from parity.tracing.trace import Trace
from tests.parity.conftest import unwrapped

LAYERS, HIDDEN = 6, 48
AUX = (1, 3, 4)
TOKENS = {"r0": tuple(range(100, 140)), "r1": tuple(range(7, 32))}
MASSIVE = 7
States = dict[str, Tensor]


def stream(seed: int, rows: int, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16) -> States:
    """A residual stream with a massive channel that all layers share, and the state behind a final RMSNorm."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(rows, HIDDEN, generator=generator)
    state[:, MASSIVE] = 300
    taps = {"embed.out": state}
    for layer in range(layers):
        step = torch.randn(rows, HIDDEN, generator=generator)
        step[:, MASSIVE] = 0
        state = state + step
        taps[f"layer.{layer}.out"] = state
    weight = 1 + torch.rand(HIDDEN, generator=torch.Generator().manual_seed(99))
    taps["final.prenorm"] = state
    taps["final.postnorm"] = state / state.square().mean(1, keepdim=True).sqrt() * weight
    return {name: tensor.to(dtype).contiguous() for name, tensor in taps.items()}


@dataclass(frozen=True)
class Bench:
    """A reference trace, its states, and an empty folder for a dump of the same states."""

    trace: Trace
    states: dict[str, States]
    out: Path


@pytest.fixture
def bench(write_trace: Callable[..., Trace], tmp_path: Path) -> Bench:
    states = {name: stream(seed, len(ids)) for seed, (name, ids) in enumerate(TOKENS.items())}
    (tmp_path / "dump").mkdir()
    return Bench(write_trace("ref", states, tokens=TOKENS), states, tmp_path / "dump")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """(exit code, standard output, standard error) of `parity compare`, in this process."""

    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run(["compare", *(str(argument) for argument in arguments)])
        captured = capfd.readouterr()
        return code, captured.out, unwrapped(captured.err)

    return command


def ids_of(name: str) -> Tensor:
    return torch.tensor(TOKENS[name])


def cat(states: States, taps: list[str]) -> Tensor:
    """[T, L*H]"""
    return torch.cat([states[tap] for tap in taps], dim=1)


def aux_taps(layers: tuple[int, ...] = AUX) -> list[str]:
    return [f"layer.{layer}.out" for layer in layers]


def write_speculators(bench: Bench, layers: tuple[int, ...] = AUX, last: str = "final.prenorm") -> list[str]:
    taps = [*aux_taps(layers), last]
    for index, (name, states) in enumerate(bench.states.items()):
        stacked = torch.stack([states[tap] for tap in taps], dim=1)
        save_file(
            {"token_ids": ids_of(name), "hidden_states": stacked}, bench.out / f"hs_{index}.safetensors"
        )
    return taps


def write_vllm(bench: Bench) -> list[str]:
    """The connector names files by request id, and its caller may ask for any layers."""
    taps = ["embed.out", "layer.2.out"]
    for name, states in bench.states.items():
        stacked = torch.stack([states[tap] for tap in taps], dim=1)
        save_file(
            {"token_ids": ids_of(name), "hidden_states": stacked}, bench.out / f"cmpl-{name}-0.safetensors"
        )
        (bench.out / f"cmpl-{name}-0.safetensors.lock").touch()  # left behind, held by nobody
    return taps


def specforge(name: str, states: States, last: bool) -> dict[str, Tensor]:
    data = {
        "input_ids": ids_of(name),
        "loss_mask": torch.ones(len(TOKENS[name]), dtype=torch.long),
        "hidden_states": cat(states, aux_taps())[None],
    }
    return data | ({"target_last_hidden_states": states["final.postnorm"][None]} if last else {})


def write_specforge(bench: Bench, *, last: bool = False, packed: bool = False) -> list[str]:
    folder = bench.out / "rows_0-5000"
    folder.mkdir()
    for index, (name, states) in enumerate(bench.states.items()):
        file = folder / f"data_{index}.ckpt"
        torch.save(specforge(name, states, last), file)
        if packed:
            with gzip.open(f"{file}.gz", "wb") as stream:
                stream.write(file.read_bytes())
            file.unlink()
    return aux_taps() + (["final.postnorm"] if last else [])


def write_eagle(bench: Bench) -> list[str]:
    for name, states in bench.states.items():
        data = {
            "input_ids": ids_of(name),
            "loss_mask": torch.ones(len(TOKENS[name])),
            "aux_hidden_state": cat(states, aux_taps())[None],
            "hidden_state": states["final.postnorm"][None],
        }
        torch.save(data, bench.out / f"data_{name}.ckpt")
    return [*aux_taps(), "final.postnorm"]


def write_modelopt(bench: Bench, *, last: str = "final.postnorm", flag: bool | None = None) -> list[str]:
    for name, states in bench.states.items():
        data: dict[str, Any] = {
            "input_ids": ids_of(name),
            "hidden_states": states[last],
            "aux_hidden_states": cat(states, aux_taps()),
            "conversation_id": f"uuid-{name}",
        }
        torch.save(data | ({} if flag is None else {"hidden_states_prenorm": flag}), bench.out / f"{name}.pt")
    return [*aux_taps(), last]


def sglang(bench: Bench, step: int, name: str, value: object, **tags: object) -> None:
    """One call of SGLang's dumper."""
    index = len(list(bench.out.iterdir())) + 1
    meta = {"step": step, "rank": 0, "dump_index": index, "name": name, "recompute_status": "disabled"} | tags
    label = "___".join(f"{key}={value}" for key, value in meta.items() if key != "dims")
    torch.save({"value": value, "meta": meta | {"world_size": 1}}, bench.out / f"{label}.pt")


def write_sglang(bench: Bench) -> list[str]:
    """A prefill of both requests in one batch, without their last two tokens; then two decode steps."""
    taps = aux_taps()
    rows = {name: len(ids) for name, ids in TOKENS.items()}
    spans = [{name: (0, rows[name] - 2) for name in TOKENS}]
    spans += [{name: (rows[name] - left, rows[name] - left + 1) for name in TOKENS} for left in (2, 1)]
    for step, span in enumerate(spans):
        ids = [token for name, (start, end) in span.items() for token in TOKENS[name][start:end]]
        positions = [place for start, end in span.values() for place in range(start, end)]
        sglang(bench, step, "input_ids", torch.tensor(ids))
        sglang(bench, step, "positions", torch.tensor(positions))
        sglang(bench, step, "seq_lens", torch.tensor([end for _, end in span.values()]))
        sglang(bench, step, "rids", list(span))
        for layer, tap in zip(AUX, taps, strict=True):
            value = torch.cat([bench.states[name][tap][start:end] for name, (start, end) in span.items()])
            sglang(bench, step, "layer_out", value, layer_id=layer, dims="t h")
        sglang(bench, step, "next_token_logits", torch.randn(2, 64))
    return taps


def write_safetensors(bench: Bench) -> list[str]:
    taps = [*aux_taps(), "final.postnorm"]
    for name, states in bench.states.items():
        data = {tap: states[tap] for tap in taps} | {"input_ids": ids_of(name), "mask": ids_of(name) * 0}
        save_file(data, bench.out / f"{name}.safetensors")
    return taps


def write_npy(bench: Bench) -> list[str]:
    """numpy has no bfloat16, so its bits are written; one tensor is summed of two, and one is transposed."""
    for name, states in bench.states.items():
        folder = bench.out / name
        folder.mkdir()
        np.save(folder / "token_ids.npy", ids_of(name).numpy())
        for layer in AUX:
            bits = states[f"layer.{layer}.out"].view(torch.int16).numpy().view(np.uint16)
            np.save(folder / f"block{layer}.npy", np.ascontiguousarray(bits.T))
    return aux_taps()


NPY_MAP = {
    "files": "{request}/{tap}.npy",
    "dtype": "bfloat16",
    "axes": {"block*": "H T"},
    "taps": {"layer.{layer}.out": "block{layer}"},
}
WRITERS: dict[str, tuple[str, Callable[[Bench], list[str]], dict[str, Any]]] = {
    "speculators": ("speculators", write_speculators, {}),
    "vllm": ("vllm", write_vllm, {}),
    "specforge": ("specforge", write_specforge, {}),
    "specforge dspark": ("specforge", lambda bench: write_specforge(bench, last=True), {}),
    "specforge gz": ("specforge", lambda bench: write_specforge(bench, last=True, packed=True), {}),
    "specforge eagle": ("specforge", write_eagle, {}),
    "modelopt": ("modelopt", write_modelopt, {}),
    "modelopt prenorm": (
        "modelopt",
        lambda bench: write_modelopt(bench, last="final.prenorm", flag=True),
        {},
    ),
    "sglang": ("sglang", write_sglang, {}),
    "safetensors": ("plain", write_safetensors, {}),
    "npy": ("plain", write_npy, NPY_MAP),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_dump_reads_to_what_was_written_and_compares(name: str, bench: Bench, run: Run) -> None:
    kind, write, side = WRITERS[name]
    taps = write(bench)
    pair = open_pair(bench.out, bench.trace.path, Mapping.model_validate({"a": side}))
    dump = pair.a.trace
    assert pair.a.format == kind and dump.taps == tuple(taps) == pair.taps
    by_ids = {entry.token_ids: entry.id for entry in dump.requests}
    for request, states in bench.states.items():
        for tap in taps:
            assert torch.equal(dump.tensor(by_ids[TOKENS[request]], tap), states[tap]), (request, tap)
    arguments = []
    if side:
        (bench.out.parent / "map.yaml").write_text(json.dumps({"a": side}))
        arguments = ["--map", bench.out.parent / "map.yaml"]
    code, out, err = run(bench.out, bench.trace.path, *arguments)
    assert (code, err) == (0, "") and out.startswith(f"PASS     {kind} dump against trace"), out + err
    assert all(len(line) <= 80 for line in out.splitlines())


def test_either_side_may_be_the_dump(bench: Bench, run: Run) -> None:
    write_speculators(bench)
    code, out, _ = run(bench.trace.path, bench.out)
    assert code == 0 and out.startswith("PASS     trace against speculators dump") and "layers.b" in out


@pytest.mark.parametrize(
    ("first", "second"), [("speculators", "specforge gz"), ("sglang", "modelopt"), ("npy", "vllm")]
)
def test_two_dumps_of_different_tools(first: str, second: str, bench: Bench, tmp_path: Path) -> None:
    """What both hold is paired by its numbers, whatever each calls it; what one lacks stays unpaired."""
    from parity.comparison.traces import compare_traces

    kept: list[Path] = []
    sides: dict[str, Any] = {}
    for letter, name in zip("ab", (first, second), strict=True):
        bench.out.mkdir(exist_ok=True)
        WRITERS[name][1](bench)
        kept.append(bench.out.rename(tmp_path / letter))
        sides[letter] = WRITERS[name][2]
    pair = open_pair(kept[0], kept[1], Mapping.model_validate(sides))
    assert pair.taps is None
    common = set(pair.a.trace.taps) & set(pair.b.trace.taps)
    expected = {"speculators": 3, "sglang": 3, "npy": 0}[first]  # npy and vllm hold other layers
    assert len(common) == expected
    if common:
        found = compare_traces(pair.a.trace, pair.b.trace, taps=sorted(common))
        assert found.outcome == "pass" and all(tap.error_max == 0 for tap in found.taps)
        assert found.tokens == sum(map(len, TOKENS.values()))


def test_a_damaged_layer_fails_in_a_dump_as_in_a_trace(bench: Bench, run: Run) -> None:
    """1 % at one slice: far below what identification needs, far above what the gate allows in float32."""
    states = {name: stream(seed, len(TOKENS[name]), dtype=torch.float32) for seed, name in enumerate(TOKENS)}
    wide = Bench(bench.trace, states, bench.out)
    reference = bench.out.parent / "wide"
    from tests.parity.conftest import write

    write(reference, states, tokens=TOKENS)
    states["r1"]["layer.3.out"] = states["r1"]["layer.3.out"] * 1.01
    write_speculators(wide)
    code, out, _ = run(bench.out, reference)
    assert code == 1 and "first layer.3.out" in " ".join(out.split()) and "PASS     compare.layers.a" in out


@pytest.mark.parametrize(
    ("given", "ids", "outcome", "words"),
    [
        (AUX, "layer", "pass", "found as layer.1.out, layer.3.out, layer.4.out, as declared"),
        ((2, 4, 5), "hidden_states", "pass", "as declared"),
        ((2, 4, 5), "layer", "fail", "every slice is 1 layer earlier than declared, as where indices of"),
        (
            AUX,
            "hidden_states",
            "fail",
            "every slice is 1 layer later than declared, as where layers are taken",
        ),
        (
            (3, 1, 4),
            "layer",
            "fail",
            "the slices are in another order: hidden_states.0, declared layer.3.out",
        ),
        (
            (1, 3, 5),
            "layer",
            "fail",
            "slices are other layers: hidden_states.2, declared layer.5.out, is layer.4.out",
        ),
        ((1, 3, 4, 5), "layer", "pass", "as declared"),  # the last state counted, too
    ],
)
def test_layer_ids_are_found_not_believed(
    given: tuple[int, ...], ids: str, outcome: str, words: str, bench: Bench, tmp_path: Path, run: Run
) -> None:
    write_speculators(bench)
    (tmp_path / "map.yaml").write_text(json.dumps({"a": {"layers": given, "ids": ids}}))
    code, out, _ = run(bench.out, bench.trace.path, "--map", tmp_path / "map.yaml")
    text = " ".join(out.split())
    assert code == {"pass": 0, "fail": 1}[outcome] and words in text, out
    assert ("fault: LAYERIDX" in text) == (outcome == "fail")
    assert "PASS compare.gate" in text, "the repaired names are compared, so that nothing else is blamed"


@pytest.mark.parametrize(
    ("write", "code", "words"),
    [
        (lambda b: write_modelopt(b, last="final.prenorm"), 1, "declared final.postnorm by the modelopt format"),
        (lambda b: write_modelopt(b, flag=True), 1, "by its flag hidden_states_prenorm, is final.postnorm"),
        (lambda b: write_modelopt(b, last="final.prenorm", flag=True), 0, "is final.prenorm, as its flag"),
        (lambda b: write_speculators(b, last="final.postnorm"), 1, "declared final.prenorm by the speculators format"),
        (lambda b: write_speculators(b, last="layer.2.out"), 1, "is layer.2.out"),
    ],
    ids=["unflagged vLLM dump", "flag is wrong", "flag is right", "norm applied", "no last layer"],
)  # fmt: skip
def test_norm_state_is_found(
    write: Callable[[Bench], object], code: int, words: str, bench: Bench, run: Run
) -> None:
    write(bench)
    got, out, _ = run(bench.out, bench.trace.path)
    text = " ".join(out.split())
    assert got == code and words in text, out
    if code and "layer.2.out" not in words:
        assert "fault: NORM" in text and "final norm" in text


@pytest.mark.parametrize(
    ("write", "outcome", "words"),
    [
        (write_speculators, "SKIPPED", "no dump proves on which side of the final norm it is"),
        (lambda b: write_modelopt(b, last="final.prenorm"), "FAIL", "one last state, two claims"),
        (write_modelopt, "PASS", "through a norm with one factor a channel fitted"),
        (write_specforge, "SKIPPED", "the other side holds no final.prenorm"),
    ],
    ids=["the same", "contradicting", "before and after", "without"],
)
def test_norm_state_of_two_dumps(
    write: Callable[[Bench], object], outcome: str, words: str, bench: Bench, tmp_path: Path, run: Run
) -> None:
    """No dump is a proof for another; but two can contradict each other."""
    write_speculators(bench)
    mine = bench.out.rename(tmp_path / "mine")
    bench.out.mkdir()
    write(bench)
    _, out, _ = run(mine, bench.out)
    text = " ".join(out.split())
    assert f"{outcome} compare.norm.a" in text and words in text, out
    assert "are taken for (side a)" in text and "PASS compare.layers.a" in text


def test_norm_state_is_found_without_the_norm_itself(bench: Bench, write_trace: Callable[..., Trace]) -> None:
    """A reference that lacks final.postnorm: the norm is fitted on every second token and checked on the others."""
    write_modelopt(bench, last="final.postnorm", flag=True)
    short = {
        name: {tap: tensor for tap, tensor in states.items() if tap != "final.postnorm"}
        for name, states in bench.states.items()
    }
    reference = write_trace("short", short, tokens=TOKENS)
    found = open_pair(bench.out, reference.path).a.found
    assert found is not None
    match = found.match("hidden_states")
    assert (match.declared, match.found, match.how) == ("final.prenorm", "final.postnorm", "norm")
    assert match.distance < 0.01 < 0.3 < match.other_distance


def test_massive_channels_do_not_blur_layers(bench: Bench) -> None:
    """Plainly measured, neighbours are 2 % apart because of one channel; without it they are 30 % apart or more."""
    write_speculators(bench)
    found = open_pair(bench.out, bench.trace.path).a.found
    assert found is not None
    one, two = bench.states["r0"]["layer.3.out"].float(), bench.states["r0"]["layer.4.out"].float()
    assert ((one - two).norm(dim=1) / two.norm(dim=1)).median() < 0.03
    assert all(match.distance < 0.01 and match.other_distance > 0.3 for match in found.matches)


def test_too_close_is_said_to_be(bench: Bench, write_trace: Callable[..., Trace]) -> None:
    """A slice half-way between two layers belongs to neither."""
    write_speculators(bench, layers=(2,))
    reference = {name: dict(states) for name, states in bench.states.items()}
    for states in reference.values():
        states["layer.2.out"] = (states["layer.2.out"].float() * 1.2).bfloat16()
        states["layer.3.out"] = (states["layer.2.out"].float() * 0.7).bfloat16()
        for layer in (0, 1, 4, 5):
            del states[f"layer.{layer}.out"]
    trace = write_trace("near", reference, tokens=TOKENS)
    with pytest.raises(ParityError, match=r"nearest is layer\.\d\.out at 0\.\d+, then .*too close to tell"):
        open_pair(bench.out, trace.path)


def scrambled(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Bench], None]:
    def write(bench: Bench) -> None:
        write_speculators(bench)
        from safetensors.torch import load_file

        for file in bench.out.iterdir():
            data = load_file(file)
            data[name] = change(data[name]).contiguous()
            save_file(data, file)

    return write


def truncated(name: str, write: Callable[[Bench], object], share: float = 0.6) -> Callable[[Bench], None]:
    def cut(bench: Bench) -> None:
        write(bench)
        file = next(bench.out.rglob(name))
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * share)])

    return cut


def shuffled(x: Tensor, axis: int) -> Tensor:
    order = torch.randperm(x.shape[axis], generator=torch.Generator().manual_seed(0))
    return x.index_select(axis, order)


class Evil:
    """Pickles to a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def evil_torch(bench: Bench) -> None:
    write_specforge(bench)
    file = bench.out / "rows_0-5000/data_0.ckpt"
    torch.save(specforge("r0", bench.states["r0"], False) | {"extra": Evil(bench.out / "ran")}, file)


def evil_gz(bench: Bench) -> None:
    evil_torch(bench)
    file = bench.out / "rows_0-5000/data_0.ckpt"
    with gzip.open(f"{file}.gz", "wb") as stream:
        stream.write(file.read_bytes())
    shutil.rmtree(bench.out / "keep", ignore_errors=True)
    for other in bench.out.rglob("*.ckpt"):
        other.unlink()


def bare_pickle(bench: Bench) -> None:
    (bench.out / "hs.pt").write_bytes(pickle.dumps({"a": Evil(bench.out / "ran")}))


def evil_npy(bench: Bench) -> None:
    np.save(bench.out / "layer.npy", np.array([Evil(bench.out / "ran")], dtype=object), allow_pickle=True)


def zip_bomb(bench: Bench) -> None:
    """A torch file whose record is deflated: 32 MiB of zeros in 32 KiB."""
    torch.save({"input_ids": torch.arange(4)}, bench.out / "a.pt")
    with zipfile.ZipFile(bench.out / "a.pt") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(bench.out / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, b"\0" * (32 << 20) if name.endswith("data/0") else content)


def gzip_bomb(bench: Bench) -> None:
    with gzip.open(bench.out / "data_0.ckpt.gz", "wb") as stream:
        for _ in range(40):
            stream.write(b"\0" * (1 << 20))


def expanded_view(bench: Bench) -> None:
    """A file of two kilobytes that claims four terabytes."""
    torch.save({"layer.0.out": torch.ones(1).expand(10**6, 10**6)}, bench.out / "a.pt")


def outside(bench: Bench) -> None:
    save_file({"layer.0.out": torch.ones(4, 4)}, bench.out.parent / "elsewhere.safetensors")
    (bench.out / "a.safetensors").symlink_to("../elsewhere.safetensors")


def outside_folder(bench: Bench) -> None:
    write_speculators(bench)
    (bench.out / "more").symlink_to("/etc")


def other_width(bench: Bench) -> None:
    write_specforge(bench)
    data = specforge("r0", bench.states["r0"], False)
    data["hidden_states"] = data["hidden_states"][..., :-5].contiguous()
    torch.save(data, bench.out / "rows_0-5000/data_0.ckpt")


def two_formats(bench: Bench) -> None:
    write_speculators(bench)
    write_modelopt(bench)


def one_layer_less(bench: Bench) -> None:
    write_speculators(bench)
    stacked = torch.stack([bench.states["r1"][tap] for tap in aux_taps()], dim=1)
    save_file({"token_ids": ids_of("r1"), "hidden_states": stacked}, bench.out / "hs_1.safetensors")


def renamed_keys(bench: Bench) -> None:
    write_specforge(bench)
    data = specforge("r0", bench.states["r0"], False)
    data["states"] = data.pop("hidden_states")
    torch.save(data, bench.out / "rows_0-5000/data_0.ckpt")


def renamed_file(bench: Bench) -> None:
    write_specforge(bench)
    (bench.out / "rows_0-5000/data_0.ckpt").rename(bench.out / "rows_0-5000/hs_0.safetensors")


def pipe(bench: Bench) -> None:
    os.mkfifo(bench.out / "hs_0.safetensors")


def shards(bench: Bench) -> None:
    sglang(bench, 0, "layer_out", torch.randn(4, 8), dims="t h[tp]", layer_id=0)


def cached_prefix(bench: Bench) -> None:
    sglang(bench, 0, "input_ids", torch.arange(4))
    sglang(bench, 0, "positions", torch.arange(64, 68))
    sglang(bench, 0, "layer_out", torch.randn(4, HIDDEN), layer_id=0)


REFUSALS: dict[str, tuple[Callable[[Bench], object], str]] = {
    "truncated safetensors": (truncated("hs_0.safetensors", write_speculators), "damaged or cut short"),
    "truncated ckpt": (truncated("data_0.ckpt", write_specforge), "zip directory cannot be read"),
    "truncated gz": (
        truncated("data_0.ckpt.gz", lambda b: write_specforge(b, packed=True)),
        "a broken gzip stream",
    ),
    "truncated npy": (truncated("block1.npy", write_npy), "damaged or cut short"),
    "truncated sglang": (truncated("*layer_id=1.pt", write_sglang), "damaged or cut short"),
    "emptied": (truncated("hs_0.safetensors", write_speculators, 0), "an empty file"),
    "renamed file": (renamed_file, "as safetensors; found: a torch file"),
    "renamed keys": (renamed_keys, "one format in one dump; found: data_0.ckpt is plain"),
    "permuted axes": (scrambled("hidden_states", lambda x: x.transpose(0, 1)), "for 40 token ids; found: [4, 40, 48]"),
    "permuted rows": (
        scrambled("hidden_states", lambda x: shuffled(x, 0)),
        "its rows are those of layer.1.out in another order",
    ),
    "permuted channels": (
        scrambled("hidden_states", lambda x: shuffled(x, 2)),
        "its channels are those of layer.1.out in another order",
    ),
    "rows shifted": (scrambled("hidden_states", lambda x: x.roll(1, 0)), "it is layer.1.out, one token late"),
    "zero rows": (scrambled("hidden_states", torch.zeros_like), "40 of 40 rows are zero"),
    "nan rows": (scrambled("hidden_states", lambda x: x * float("nan")), "40 of 40 rows are not finite"),
    "short ids": (scrambled("token_ids", lambda x: x[:-16]), "for 24 token ids"),
    "pickled code": (evil_torch, "which would run code when it is read; nothing was run"),
    "pickled code, gz": (evil_gz, "posix.mkdir, which would run code"),
    "pickle": (bare_pickle, "a bare pickle"),
    "pickled array": (evil_npy, "an array of Python objects, which would run code"),
    "zip bomb": (zip_bomb, "is compressed; torch.save never writes that"),
    "gzip bomb": (gzip_bomb, "a zip bomb, or states that are all alike"),
    "expanded view": (expanded_view, "made of 4 bytes: an expanded view"),
    "link outside": (outside, "files of the given folder only"),
    "linked folder": (outside_folder, "a link to a folder"),
    "pipe": (pipe, "no regular file"),
    "two formats": (two_formats, "hs_0.safetensors is speculators; r0.pt is modelopt"),
    "other slices": (one_layer_less, "4 slices (bfloat16 of 48, last pre-norm) in hs_0.safetensors, 3 slices"),
    "odd width": (other_width, "139 channels, which is no multiple"),
    "shards": (shards, "a shard of it (dims 't h[tp]')"),
    "cached prefix": (cached_prefix, "came from a prefix cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_trusted_is_refused(name: str, bench: Bench, run: Run) -> None:
    make, found = REFUSALS[name]
    make(bench)
    code, out, err = run(bench.out, bench.trace.path)
    lines = err.strip().splitlines()
    assert (code, out) == (2, "") and len(lines) == 2 and lines[1].startswith("do this: "), err
    assert found in lines[0], err
    assert not (bench.out / "ran").exists(), "code of a dump was run"


def test_a_bomb_is_stopped_at_the_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stream of 40 MiB from 40 KiB: no more than the allowed bytes reach the disk, and nothing stays."""
    gzip_bomb(bench)
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    with pytest.raises(ParityError, match="more than 2097152 bytes from"):
        open_file(bench.out / "data_0.ckpt.gz", FileLimits(free_bytes=2 << 20, ratio=1))
    assert list((tmp_path / "spool").iterdir()) == []
    write_specforge(bench, packed=True)
    opened = open_file(bench.out / "rows_0-5000/data_0.ckpt.gz")
    assert list((tmp_path / "spool").iterdir()) == [] and opened.tensor("input_ids").numel() == 40


def test_a_file_that_is_being_written_is_refused(bench: Bench) -> None:
    fcntl = pytest.importorskip("fcntl")
    write_vllm(bench)
    lock = bench.out / "cmpl-r0-0.safetensors.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ParityError, match="its writer still holds"):
            open_pair(bench.out, bench.trace.path)
    assert open_pair(bench.out, bench.trace.path).a.format == "vllm"


def test_swapped_file_names_do_not_matter(bench: Bench, run: Run) -> None:
    """hs_0 and hs_1 change names: token ids say which is which."""
    write_speculators(bench)
    (bench.out / "hs_0.safetensors").rename(bench.out / "hs_x")
    (bench.out / "hs_1.safetensors").rename(bench.out / "hs_0.safetensors")
    (bench.out / "hs_x").rename(bench.out / "hs_1.safetensors")
    assert run(bench.out, bench.trace.path)[0] == 0


def test_other_tokens_are_nothing_comparable(bench: Bench, run: Run) -> None:
    scrambled("token_ids", lambda ids: ids + 1000)(bench)
    code, out, err = run(bench.out, bench.trace.path)
    assert (code, out) == (3, "") and "no two begin with the same token id" in err


def without_ids(bench: Bench, rows: dict[str, int] | None = None) -> None:
    for name, states in bench.states.items():
        tap = "layer.2.out"
        save_file(
            {tap: states[tap][: (rows or {}).get(name)].contiguous()}, bench.out / f"{name}.safetensors"
        )


def test_rows_without_token_ids_need_a_word(bench: Bench, run: Run, tmp_path: Path) -> None:
    without_ids(bench)
    code, out, err = run(bench.out, bench.trace.path)
    assert (code, out) == (3, "") and "without token ids" in err and "--align order" in err
    code, out, _ = run(bench.out, bench.trace.path, "--align", "order")
    text = " ".join(out.split())
    assert code == 0 and out.startswith("WARN") and "paired by their order, as asked" in text
    assert "the two runs were fed other tokens" not in text.split("not tested")[0] or "not tested" in text
    (tmp_path / "map.yaml").write_text("align: order")
    assert run(bench.out, bench.trace.path, "--map", tmp_path / "map.yaml")[0] == 0


def test_order_needs_equal_rows(bench: Bench, run: Run) -> None:
    without_ids(bench, {"r1": 20})
    code, _, err = run(bench.out, bench.trace.path, "--align", "order")
    assert code == 3 and "20 and 25 rows in request 1" in err


def test_two_dumps_without_token_ids(bench: Bench, tmp_path: Path) -> None:
    without_ids(bench)
    shutil.copytree(bench.out, tmp_path / "again")
    with pytest.raises(NothingComparable):
        open_pair(bench.out, tmp_path / "again")
    pair = open_pair(bench.out, tmp_path / "again", align="order")
    assert pair.by_order and [entry.token_ids for entry in pair.a.trace.requests] == [
        tuple(range(40)),
        tuple(range(25)),
    ]


def test_summed_tensors(bench: Bench) -> None:
    """SGLang's layers return what they add and the residual apart; the state is their sum."""
    for name, states in bench.states.items():
        before, after = states["layer.1.out"], states["layer.2.out"]
        data = {"input_ids": ids_of(name), "out.2": after - before, "residual.2": before}
        save_file(data, bench.out / f"{name}.safetensors")
    side = SideMap(taps={"layer.{layer}.out": ("out.{layer}", "residual.{layer}")})
    dump = open_pair(bench.out, bench.trace.path, Mapping(a=side)).a.trace
    summed = (bench.states["r0"]["layer.2.out"] - bench.states["r0"]["layer.1.out"]) + bench.states["r0"][
        "layer.1.out"
    ]
    assert dump.taps == ("layer.2.out",) and torch.equal(dump.tensor("r0", "layer.2.out"), summed)
    with pytest.raises(ParityError, match="the layer of out.2"):
        open_pair(bench.out, bench.trace.path)  # by itself, what a layer adds is no state


def test_slices_are_views_of_the_mapped_file(bench: Bench) -> None:
    write_speculators(bench)
    dump = open_pair(bench.out, bench.trace.path).a.trace
    assert isinstance(dump, DumpTrace)
    tensor = dump.tensor("hs_0", "layer.3.out")
    assert tensor.stride() == (4 * HIDDEN, 1), "a slice of [T, L, H] was copied"
    bench.out.rename(bench.out.parent / "moved")  # open maps outlive the name
    assert torch.equal(tensor, bench.states["r0"]["layer.3.out"])


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("a: {layer: [1]}", "a.layer: Extra inputs", "write 'layers'"),
        ("alig: order", "alig: Extra inputs", "write 'align'"),
        ("a: {layers: [1, 2]}", "say `ids: layer` or `ids: hidden_states`", "known keys here: format"),
        ("a: {format: megatron}", "a.format: Input should be 'speculators'", "known keys here"),
        ("a: {files: '../{request}.npy'}", "no leading /, no ..", "known keys here"),
        ("a: {files: '/etc/{request}'}", "no leading /, no ..", "known keys here"),
        ("a: {files: 'x.npy'}", "write {request}, {tap} or both", "known keys here"),
        ("a: {axes: {h: 'T Q'}}", "write T, H and, where there, L", "known keys here"),
        ("a: [1", "no readable YAML", "name a YAML file"),
        ("!!python/object/apply:os.mkdir ['ran']", "no readable YAML", "name a YAML file"),
    ],
)
def test_a_mapping_is_checked(text: str, found: str, do: str, bench: Bench, tmp_path: Path, run: Run) -> None:
    write_speculators(bench)
    (tmp_path / "map.yaml").write_text(text)
    code, _, err = run(bench.out, bench.trace.path, "--map", tmp_path / "map.yaml")
    first, second = (" ".join(line.split()) for line in (err.strip().rsplit("\n", 1)))
    assert code == 2 and found in first and do in second, err
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("side", "found"),
    [
        ({"layers": (1, 3), "ids": "layer"}, "2 layers for the slices of"),
        ({"taps": {"layer.3.out": "nope"}}, "tensors hidden_states.0, hidden_states.1"),
        ({"files": "x_{request}.safetensors"}, "named like 'x_{request}.safetensors'"),
        ({"hidden": 7}, ""),
        ({"axes": {"hidden_states": "T H"}}, "as [T H] for 40 token ids"),
        ({"token_ids": "hidden_states"}, "as token ids; found: bfloat16 [40, 4, 48]"),
        ({"format": "modelopt"}, "as modelopt, with input_ids"),
    ],
)
def test_a_mapping_that_does_not_fit(side: dict[str, Any], found: str, bench: Bench) -> None:
    write_speculators(bench)
    mapping = Mapping.model_validate({"a": side})
    if not found:  # a width that is not needed changes nothing
        assert open_pair(bench.out, bench.trace.path, mapping).a.format == "speculators"
        return
    with pytest.raises(ParityError) as refusal:
        open_pair(bench.out, bench.trace.path, mapping)
    assert found in str(refusal.value)


def test_a_trace_needs_no_mapping(bench: Bench) -> None:
    write_speculators(bench)
    with pytest.raises(ParityError, match="which says itself what it holds"):
        open_pair(bench.out, bench.trace.path, Mapping(b=SideMap(last="pre")))


def test_a_missing_dump_and_an_empty_one(bench: Bench, run: Run) -> None:
    for path, found in ((bench.out / "none", "no such folder"), (bench.out, "without manifest.json")):
        code, out, err = run(bench.trace.path, path)
        assert (code, out) == (2, "") and found in err
    (bench.out / "readme.txt").write_text("nothing here")
    code, _, err = run(bench.trace.path, bench.out)
    assert code == 2 and "1 files, none of them safetensors" in err


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("hs_10", "hs_2", "hs_1"):
        (tmp_path / f"{name}.safetensors").touch()
    assert [path.stem for path in files_below(tmp_path)] == ["hs_1", "hs_2", "hs_10"]


# --- The function, the golden, the environment -----------------------------------------------------------


def test_the_function_takes_what_the_command_takes(bench: Bench, tmp_path: Path) -> None:
    """`parity.compare`: a path to a dump, an opened trace, a mapping's file."""
    import parity

    write_npy(bench)
    (tmp_path / "map.yaml").write_text(json.dumps({"a": NPY_MAP}))
    found = parity.compare(bench.out, bench.trace, mapping=tmp_path / "map.yaml")
    assert found.outcome == "pass" and [tap.tap for tap in found.taps] == aux_taps()
    assert found.tokens == sum(map(len, TOKENS.values())) and found.source_problems == ()


def test_the_function_pairs_by_order_only_where_asked(bench: Bench) -> None:
    import parity

    for name, states in bench.states.items():
        save_file({tap: states[tap] for tap in aux_taps()}, bench.out / f"{name}.safetensors")
    with pytest.raises(NothingComparable, match="without token ids"):
        parity.compare(bench.out, bench.trace.path)
    assert parity.compare(bench.out, bench.trace.path, align="order").outcome == "pass"


def test_a_dump_of_other_layers_fails_the_function_too(bench: Bench) -> None:
    """Its slices are compared under the names that were found, so every number agrees; what was said is wrong."""
    import parity
    from parity.diagnosis.report import comparison_report

    write_speculators(bench, layers=(2, 4, 5))
    mapping = Mapping.model_validate({"a": {"layers": AUX, "ids": "layer"}})
    found = parity.compare(bench.out, bench.trace.path, mapping=mapping)
    assert all(tap.outcome == "pass" for tap in found.taps)
    assert found.outcome == "fail"
    assert "every slice is 1 layer later than declared" in found.source_problems[0]
    report = comparison_report(found, "test")
    assert report.findings[0].name == "compare.sources" and report.outcome == "fail"


def as_golden(bench: Bench, weights: str) -> Path:
    """The same states in float64, as a golden capture would say them; and what weights it had."""
    from tests.parity.conftest import write

    states = {name: {tap: x.double() for tap, x in taps.items()} for name, taps in bench.states.items()}
    return write(bench.out.parent / f"golden-{weights}", states, tokens=TOKENS, weights={"w": weights}).path


def noisy(bench: Bench, size: float) -> Bench:
    """The states with a rounding of this size, for a dump."""
    generator = torch.Generator().manual_seed(5)
    states = {
        name: {
            tap: x * (1 + size * torch.randn(x.shape, generator=generator)).to(x) for tap, x in taps.items()
        }
        for name, taps in bench.states.items()
    }
    return Bench(bench.trace, states, bench.out)


@pytest.mark.parametrize("dump", ["a", "b"])
@pytest.mark.parametrize(("size", "code"), [(0.0, 0), (0.05, 1)])
def test_a_golden_judges_a_dump_on_either_side(
    size: float, code: int, dump: str, bench: Bench, run: Run
) -> None:
    """The trace states the golden's weights. A dump that is 5 % off is found on side b, too, where a ratio to it
    would allow anything."""
    write_speculators(noisy(bench, size))
    sides = (bench.out, bench.trace.path)
    given, out, err = run(*(sides if dump == "a" else sides[::-1]), "--golden", as_golden(bench, "1"))
    assert (given, err) == (code, ""), out + err
    said = " ".join(out.split())
    assert "judged by ratio to golden" in said or "of the golden" in said or "from the golden" in said
    assert f"side {dump} states no weights" in said


def test_a_golden_of_other_weights_is_refused_beside_a_dump(bench: Bench, run: Run) -> None:
    write_speculators(bench)
    code, _, err = run(bench.trace.path, bench.out, "--golden", as_golden(bench, "2"))
    assert code == 2 and "other weights than side A's" in err and str(bench.trace.path) in err


def test_a_golden_of_two_dumps_is_refused_with_the_reason(bench: Bench, tmp_path: Path, run: Run) -> None:
    """Both could be as far from it, equally, and a ratio of the two would pass."""
    write_speculators(bench)
    shutil.copytree(bench.out, tmp_path / "other")
    code, _, err = run(bench.out, tmp_path / "other", "--golden", as_golden(bench, "1"))
    assert code == 2 and "dumps on both sides, which state no weights" in err and "parity capture" in err


def test_a_dump_states_no_environment(bench: Bench, run: Run, tmp_path: Path) -> None:
    write_speculators(bench)
    assert run(bench.out, bench.trace.path, "--out", tmp_path / "report")[0] == 0
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    names = [part["name"] for part in (*data["findings"], *data["tables"])]
    assert "compare.gate" in names and not any("environment" in name for name in names)

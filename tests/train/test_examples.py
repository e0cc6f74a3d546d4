"""The examples beside digits.py: they run on one rank and on two, say what came out, and can fail."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fault import hosts
from tests.helpers import free_port, need
from tests.train.harness import ROOT, ring_is_built, run_ranks

need("sklearn.datasets", "scikit-learn")
need("tqdm")
pytestmark = [pytest.mark.ci, pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")]

# Quick settings, and what the last lines say.
QUICK = {
    "linear_regression": ([], r"ok     RingDP against one process: largest difference of a weight [\de.-]+ "),
    "unequal_machines": (
        ["--epochs=2", "--sleep-ms=0.2"],
        r"samples of a batch of 64, by rank: \d+(, \d+)*\n  ok     RingDP against one process: largest difference",
    ),
    "far_apart": (
        ["--steps=100", "--every=20", "--worst=4"],
        r"exact in every step: loss \d\.\d{4}; .*\n  ok     rounds of 20 steps: loss \d\.\d{4}; .*\n"
        r"  ok     parameters bit-identical on all ranks",
    ),
    "char_lm": (
        ["--steps=60", "--batch-size=8", "--context=32", "--width=32", "--layers=1", "--lr=0.01", "--characters=30000"],
        r"ok     bits per character on 3,000 unseen ones: [5-9]\.\d+ before, [34]\.\d+ after, 4\.\d+ by",
    ),
    "compare_compressors": (
        ["--seeds=1", "--epochs=1", "--compressors=exact,int8", "--min-accuracy=20"],
        r"exact +\d+\.\d+ ± 0\.00 +[\d,]+ +1\.000 .*\nint8 +\d+\.\d+ ± 0\.00 +[\d,]+ +0\.[23]\d+ ",
    ),
    "resnet": (
        ["--width", "4", "--epochs", "1", "--batch-size", "64", "--lr", "0.1"],
        r"ok     accuracy on 360 other images: 0\.\d{4} ",
    ),
    "masked_lm": (
        [
            "--steps=150",
            "--width=32",
            "--layers=1",
            "--characters=60000",
            "--lr=0.01",
            "--batch-size=32",
            "--length=64",
        ],
        r"own, 2[\d,]+ parameters\n  ok     loss at the end [123]\.\d{3}; right of hidden characters of unseen text:"
        r" 0\.\d{3}, by the most frequent one 0\.\d{3}",
    ),
    "recommender": (
        ["--steps=150", "--users=100", "--films=60", "--max-error=0.9"],
        r"50 users and 30 films on rank 0\n  ok     error on 8,192 unseen ratings: 0\.\d{4} ",
    ),
    "factorisation": (
        ["--steps=300", "--users=100", "--films=60", "--slow-ms=1", "--max-error=0.7"],
        r"ranks?, staleness None: \d+ steps a second on rank 0\n  ok     error on 8,192 unseen ratings: 0\.\d{4} ",
    ),
    "train_amp": (
        ["--epochs", "2", "--overflow-at", "3", "--min-accuracy", "0.5"],
        r"ok     parameters and loss scale bit-identical on 2 ranks, [\da-f]{16}….*"
        r"ok     steps skipped: \[3\], at least \[3\]\n  ok     test accuracy: 0\.\d{4} ",
    ),
    "custom_compressor": (
        ["--epochs=15"],
        r"Sign\(\): 1\.12 bits an element.*"
        r"ok  the payloads and the residuals add up to the gradients \(error feedback\)\n"
        r"\d ranks, backend ring, loss 0\.\d+\n  ok     parameters bit-identical on all ranks",
    ),
    "c_compressor": (
        [],
        r"CCompressor\('shift8', 8\.12 bits an element.*"
        r"ok  its functions do what ringdp/compressor\.h says, and write nowhere else\n.*"
        r"\d ranks, 200 steps\n  ok     parameters bit-identical on all ranks\n  ok     loss 0\.00\d+ ",
    ),
}
WITHOUT_A_BAR = ("custom_compressor", "c_compressor", "factorisation")
NO_COMPILER = "skipped: there is no C compiler on this machine (apt-get install gcc)\n"
FAILING = {
    "linear_regression": ["--tolerance", "-1"],
    "unequal_machines": [*QUICK["unequal_machines"][0], "--tolerance", "-1"],
    "far_apart": [*QUICK["far_apart"][0], "--worst", "0.01"],
    "char_lm": [*QUICK["char_lm"][0], "--steps", "1"],
    "compare_compressors": [*QUICK["compare_compressors"][0], "--min-accuracy", "101"],
    "resnet": [*QUICK["resnet"][0], "--min-accuracy", "1.01"],
    "masked_lm": [*QUICK["masked_lm"][0], "--steps", "1"],
    "recommender": [*QUICK["recommender"][0], "--max-error", "0.1"],
    "factorisation": ["--steps", "5"],
    "train_amp": [*QUICK["train_amp"][0], "--min-accuracy", "1.01"],
    "custom_compressor": ["--epochs", "1", "--min-accuracy", "1.01"],
    "c_compressor": ["--steps", "1"],
}


def run_main(name: str, arguments: list[str], port: int = 0, *, silent: bool = False) -> tuple[int, str, str]:
    """Exit code and both streams of the example's main, in this process; `silent`: its RingDP does not communicate."""
    import ringdp

    example = importlib.import_module(f"examples.{name}")

    class Silent(ringdp.RingDP):
        def forward(self, *inputs: Any, **named: Any) -> Any:
            with self.no_sync():
                return super().forward(*inputs, **named)

    out, err, wrapper = io.StringIO(), io.StringIO(), ringdp.RingDP
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if port else {}
    os.environ.update(variables)
    try:
        if silent:
            ringdp.RingDP = Silent  # type: ignore[misc]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = example.main(arguments)
    finally:
        ringdp.RingDP = wrapper  # type: ignore[misc]
        for variable in variables:
            del os.environ[variable]
    return code, out.getvalue(), err.getvalue()


def on_two_ranks(name: str, arguments: list[str], *, silent: bool = False) -> list[tuple[int, str, str]]:
    return run_ranks(run_main, name, arguments, free_port(), silent=silent, world_size=2, backend=None)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "RINGDP_")
    for variable in [variable for variable in os.environ if variable.startswith(launcher)]:
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(name: str) -> None:
    arguments, words = QUICK[name]
    (code, out, err), (other_code, other_out, other_err) = on_two_ranks(name, arguments)
    if out == NO_COMPILER:
        pytest.skip(out)
    assert (code, other_code) == (0, 0), out
    assert re.search(r"^2 ranks", out, re.MULTILINE), out
    assert re.search(words, out, re.DOTALL), out
    assert "100%" in err or name in WITHOUT_A_BAR
    assert other_out == "", "rank 0 alone speaks"
    assert "%|" not in other_err, "and shows a bar"


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.slow  # with the example's own defaults: 13 s of each of two cores
def test_hugging_faces_roberta_learns_more_than_frequencies() -> None:
    need("transformers")
    arguments = "masked_lm", ["--model=roberta"], free_port()
    (code, out, err), (other_code, *_) = run_ranks(run_main, *arguments, world_size=2, backend=None, timeout_s=200)
    assert (code, other_code) == (0, 0), out + err
    found = re.search(r"roberta, [\d,]+ parameters\n  ok     .*text: (0\.\d+), by the most frequent one (0\.\d+)", out)
    assert found, out
    assert float(found[1]) > 1.2 * float(found[2])


def test_the_recommender_comes_to_one_error_on_any_number_of_ranks() -> None:
    arguments = QUICK["recommender"][0]
    errors = []
    for code, out, err in (run_main("recommender", arguments), on_two_ranks("recommender", arguments)[0]):
        assert code == 0, err
        found = re.search(r"unseen ratings: (\d\.\d+)", out)
        assert found
        errors.append(float(found[1]))
    assert abs(errors[0] - errors[1]) < 2e-3, errors
    assert 0.6 < errors[0] < 0.9


@pytest.mark.nightly
@pytest.mark.usefixtures("no_launcher")
def test_two_sites_in_network_namespaces() -> None:
    """As the example's own text says: the command makes the sites."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    command = "-m benchmarks long_line --hosts 2 --per-host 2 --rate 20mbit --delay 5ms --"
    words = [sys.executable, *command.split(), sys.executable, "examples/far_apart.py", *QUICK["far_apart"][0]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode == 2 and "/dev/net/tun" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    said = "\n".join(line.removeprefix("[0] ") for line in done.stdout.splitlines() if line.startswith("[0] "))
    assert re.search(r"^4 ranks in 2 places, 100 steps$", said, re.MULTILINE), done.stdout
    assert re.search(QUICK["far_apart"][1], said), said


def port_of_mxnet(port: int, folder: str, name: str = "from_mxnet") -> float:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    before = os.getcwd()
    os.chdir(folder)
    try:
        accuracy: float = importlib.import_module(f"examples.{name}").main(8)
        return accuracy
    finally:
        os.chdir(before)


def test_the_port_from_mxnet_learns(tmp_path: Path) -> None:
    assert min(run_ranks(port_of_mxnet, free_port(), str(tmp_path), world_size=2, backend=None)) > 0.9
    assert (tmp_path / "digits.pt").exists()


def test_so_does_the_asynchronous_one(tmp_path: Path) -> None:
    ran = run_ranks(port_of_mxnet, free_port(), str(tmp_path), "from_mxnet_async", world_size=2, backend=None)
    assert max(ran) < 0.1  # the variance of the ratings is 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
@pytest.mark.usefixtures("no_launcher")
def test_one_rank_needs_no_launcher_and_a_check_can_fail(name: str) -> None:
    code, out, _ = run_main(name, FAILING[name])
    assert code == 1, out
    assert re.search(r"^1 rank\b", out, re.MULTILINE), out
    assert "FAILED" in out


@pytest.mark.parametrize(
    ("name", "arguments", "checks"),
    [
        ("linear_regression", [], ["RingDP against one process"]),
        (
            "digits",
            ["--epochs=1", "--min-accuracy=1.01"],
            [r"parameters bit-identical: ranks \[1\] differ", "loss after 20 steps", "test accuracy"],
        ),
    ],
)
def test_a_wrapper_that_does_not_communicate_is_found_out(name: str, arguments: list[str], checks: list[str]) -> None:
    (code, out, _), (other_code, other_out, _) = on_two_ranks(name, arguments, silent=True)
    assert (code, other_code, other_out) == (1, 1, "")
    for check in checks:
        assert re.search(f"FAILED {check}", out), out


@pytest.mark.usefixtures("no_launcher")
def test_without_a_compiler_the_example_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_main("c_compressor", [])[:2] == (0, NO_COMPILER)


def test_the_same_seed_gives_the_same_and_another_gives_another() -> None:
    arguments = [*QUICK["char_lm"][0], "--steps", "3"]
    first, again, other = (on_two_ranks("char_lm", [*arguments, "--seed", seed])[0][1] for seed in "001")
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", [*QUICK, "checkpoint_resume", "digits"])
@pytest.mark.usefixtures("no_launcher")
def test_help_says_how_to_run_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(f"examples.{name}")
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"python launch.py --nproc-per-node \d .*examples/{name}.py", text)
    assert f"python examples/{name}.py" in text
    assert "--seed" in text


# examples/char_lm.py


def test_the_text_is_the_library_s_and_always_the_same() -> None:
    from examples import char_lm

    text = char_lm.read(50_000)
    assert len(text) == 50_000
    assert text == char_lm.read(50_000)
    assert b"Abstract Base Classes" in text, "abc, by its name one of the first"


def test_each_window_counts_once_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import ringdp
    from examples import char_lm

    data, alphabet = char_lm.encode(torch.frombuffer(bytearray(char_lm.read(1_000)), dtype=torch.uint8))
    options = char_lm.parse(["--context", "32", "--width", "16", "--layers", "1"])
    torch.manual_seed(0)
    model = char_lm.GPT(len(alphabet), options)
    parts: list[tuple[float, float]] = []

    def note(x: float, weight: float) -> float:
        parts.append((x, weight))
        return x

    monkeypatch.setattr(ringdp.metrics, "mean", note)
    monkeypatch.setattr(ringdp, "device", lambda: torch.device("cpu"))
    together = {}
    for world in (1, 3, 40):  # 31 windows: some of 40 ranks have none
        parts.clear()
        for rank in range(world):
            monkeypatch.setattr(ringdp, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(ringdp, "world_size", lambda world=world: world)
            char_lm.bits_per_character(model, data, options)
        assert sum(weight for _, weight in parts) == 31 * 32
        together[world] = sum(x * weight for x, weight in parts) / (31 * 32)
    assert together[3] == pytest.approx(together[1], rel=1e-5)
    assert together[40] == pytest.approx(together[1], rel=1e-5)


# examples/train_amp.py


@pytest.mark.parametrize("options", [["--compression", "int4"], ["--compression", "none", "--precision", "bfloat16"]])
def test_loss_scaling_goes_on_from_a_checkpoint(options: list[str], tmp_path: Path) -> None:
    arguments = [*QUICK["train_amp"][0], *options, "--folder", str(tmp_path)]
    (code, out, _), _ = on_two_ranks("train_amp", [*arguments, "--epochs", "1"])
    assert code == 0 or "FAILED test accuracy" in out, out
    (code, out, _), _ = on_two_ranks("train_amp", arguments)
    assert code == 0, out
    assert re.search(r"^continuing from step 22 with loss scale 32768$", out, re.MULTILINE), out
    assert "2 ranks, 44 steps" in out


# examples/resnet.py


def write_batch(path: Path, batch: Any) -> None:
    path.write_bytes(pickle.dumps(batch, protocol=2))


def cifar(folder: Path, images: int = 40) -> Path:
    """Files as CIFAR-10's, whose classes are told by their brightness."""
    generator = np.random.default_rng(0)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        labels = generator.integers(0, 10, images)
        data = (labels[:, None] * 25 + generator.integers(0, 10, (images, 3072))).astype(np.uint8)
        write_batch(folder / name, {b"data": data, b"labels": labels.tolist(), b"batch_label": b"made up"})
    return folder


def test_resnet_reads_a_folder_of_cifar_10(tmp_path: Path) -> None:
    arguments = ["--data", str(cifar(tmp_path)), "--width", "4", "--batch-size", "16", "--epochs", "1", "--sync-bn"]
    (code, out, _), _ = on_two_ranks("resnet", arguments)
    assert code == 0, out
    assert "SyncBatchNorm, 1 epochs of 200 images" in out
    assert "accuracy on 40 other images" in out


class Program:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("it-ran",))


@pytest.mark.parametrize(
    "batch, words",
    [
        ({b"data": Program(), b"labels": []}, "posix.mkdir has no business in there"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "KeyError: b'labels'"),
        ({b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]}, r"torch.float32 \[2, 3072\]"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2, 3]}, r"torch.int64 \[3\] where CIFAR-10 has"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 10]}, "labels from 1 to 10"),
        ([1, 2], "TypeError"),
        (b"", "is not a file of CIFAR-10"),
    ],
)
def test_what_is_not_cifar_10_is_refused_and_never_run(
    batch: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import resnet

    monkeypatch.chdir(tmp_path)
    path = cifar(tmp_path, 2) / "data_batch_3"
    if batch == b"":
        path.write_bytes(batch)
    else:
        write_batch(path, batch)
    with pytest.raises(SystemExit, match=words):
        resnet.main(["--data", str(tmp_path)])
    assert not Path("it-ran").exists()


def test_resnet_18_has_the_layers_of_resnet_18() -> None:
    from examples import resnet

    network = resnet.ResNet18(64)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962  # as for CIFAR-10 elsewhere
    convolutions = [layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d)]
    shortcuts = [layer for layer in convolutions if layer.kernel_size == (1, 1)]
    assert len(convolutions) - len(shortcuts) + 1 == 18
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# As a user starts them.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK)
def test_the_launcher_starts_them(name: str, tmp_path: Path) -> None:
    arguments, words = QUICK[name]
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("RINGDP_", "TORCHELASTIC_"))}
    command = [str(ROOT / "launch.py"), "--nproc-per-node", "3", str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout

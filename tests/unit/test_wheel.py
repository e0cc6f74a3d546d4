"""The wheel: what is in it, and that it trains where there is no compiler and no checkout."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers import checkout_files, need

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import hashlib
import torch, ringdp

ringdp.init()
assert "site-packages" in ringdp.__file__, ringdp.__file__
torch.manual_seed(ringdp.rank())  # RingDP gives everybody rank 0's parameters
model = ringdp.RingDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 8)
y = x[:, :1]
losses = []
for _ in range(20):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
with open(f"rank{ringdp.rank()}", "w") as file:
    file.write(f"{ringdp.world_size()} {hashlib.sha256(state).hexdigest()}")
ringdp.shutdown()
"""


def ringdp_version() -> str:
    (version,) = re.findall(r'^__version__ = "(.+?)"', (ROOT / "ringdp" / "__init__.py").read_text(), re.MULTILINE)
    return str(version)


def make_wheel(folder: Path, **variables: str) -> Path:
    need("pip")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), "."]
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "wheel.lock", "w") as lock:  # another test run in this checkout uses the same folders
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("ringdp-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout with the modules that the other tests use: nothing is compiled for it."""
    return make_wheel(tmp_path_factory.mktemp("wheel"), RINGDP_PACK_BUILT="1")


@pytest.fixture(scope="module")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it. torch comes from this one, to save installing it again.

    A path in a .pth file lends packages, but not what their own .pth files say: the checkout stays out of sight.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "lent.pth").write_text("\n".join(lent))
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-index"]
    # Through PYTHONPATH pip would see the checkout, and take ringdp for installed.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*command, "--no-deps", "--quiet", str(wheel)], check=True, env=env)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Only the environment's own programs on PATH, so neither a compiler nor ninja of the machine."""
    kept = {key: value for key, value in os.environ.items() if key in {"HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH"}}
    return kept | {"PATH": str(folder / "bin")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pip_compiles_it(tmp_path: Path) -> None:
    """Minutes where something in the compiler's command changed since `make build`, such as a ccache that came."""
    test_contents(make_wheel(tmp_path))


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    modules = sorted(name.split(".")[0] for name in names if name.endswith(".so"))
    assert modules == ["ringdp/_C"]
    assert "ringdp/_build_info.py" in names
    assert "ringdp/include/ringdp/compressor.h" in names
    assert any(name.endswith("LICENSE") for name in names)
    strangers = [n for n in names if not n.startswith(("ringdp/", "ringdp-")) or "csrc" in n]
    assert not strangers
    assert "ringrun = ringdp.launcher.__main__:main" in points
    assert "[torch.backends]\nringdp = ringdp._autoload:register" in points
    import torch

    major, minor = torch.__version__.split(".")[:2]
    assert f"Version: {ringdp_version()}+torch{major}.{minor}\n" in metadata  # wheels for two releases have two names
    assert wheel.name.startswith(f"ringdp-{ringdp_version()}+torch{major}.{minor}-")
    assert f"Requires-Dist: torch<{major}.{int(minor) + 1}.0,>={major}.{minor}.0" in metadata
    assert wheel.name.split("-")[4] != "any.whl", "a wheel with compiled modules names its platform"


def test_torch_finds_the_backend_by_itself(clean_environment: Path, tmp_path: Path) -> None:
    code = "import torch; print('ring' in torch.distributed.Backend.backend_list)"
    python = str(clean_environment / "bin" / "python")
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment(clean_environment), capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.slow
def test_trains_without_a_compiler(clean_environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [str(clean_environment / "bin" / "ringrun"), "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(clean_environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (tmp_path / "rank0").read_text(), (tmp_path / "rank1").read_text()
    assert first.startswith("2 ")
    assert first == second


def without_torch(folder: Path) -> dict[str, str]:
    """An environment whose Python finds no torch: a module in its place raises what a missing one does."""
    venv = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    for pattern in ("setuptools", "setuptools-*.dist-info", "_distutils_hack", "pkg_resources"):
        found = [match for path in sys.path for match in Path(path).glob(pattern)]
        if found:
            (site_packages / found[0].name).symlink_to(found[0])
    return {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, made without torch from what git knows of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    environ = without_torch(folder)
    copy = folder / "copy"
    for name in checkout_files(ROOT):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    command = ["python", "setup.py", "-q", "sdist", "-d", str(folder)]
    done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.tar.gz")
    return path


def test_a_source_archive_needs_no_torch_and_has_everything(archive: Path) -> None:
    assert archive.name == f"ringdp-{ringdp_version()}.tar.gz"
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
        metadata = content.extractfile(f"ringdp-{ringdp_version()}/PKG-INFO")
        assert metadata is not None
        text = metadata.read().decode()
    assert "Requires-Dist: torch>=2.11\n" in text
    assert "Provides-Extra: lightning" in text
    wanted = ["README.md", "Makefile", "launch.py", "tools/extension_build.py", "docs/how-to/launching.md"]
    wanted += ["examples/digits.py", "tests/unit/test_wheel.py", "tests/tiers.py", "ringdp/csrc/base/codecs.def"]
    assert [name for name in wanted if name not in names] == []
    assert not any(name.endswith((".so", ".pyc")) or name == "ringdp/_build_info.py" for name in names)


def test_what_pip_is_told_where_it_builds_by_itself(tmp_path: Path) -> None:
    """pip's own environment for a build has no torch, and pip would download one in vain."""
    environ = without_torch(tmp_path)
    isolated = tmp_path / "pip-build-env-x" / "site"
    isolated.mkdir(parents=True)
    for command in ("egg_info", "bdist_wheel"):
        done = subprocess.run(
            ["python", "setup.py", command],
            cwd=ROOT,
            env={**environ, "PYTHONPATH": str(isolated)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "add --no-build-isolation: `pip install --no-build-isolation .`" in done.stderr
        assert "Traceback" not in done.stderr

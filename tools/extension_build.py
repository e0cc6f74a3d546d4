"""Builds ringdp._C (the core and the torch side) and tests.core._core (the core, no torch header), for setup.py.

The core's sources are compiled once: their objects are linked into both modules. tests.core._core is for tests and
benchmarks, and built in a checkout only. Where torch has CUDA and a fitting
nvcc is there, ringdp._C gets csrc/cuda/*.cu and csrc/torch/device/cuda; elsewhere csrc/cuda/absent.cpp and
csrc/torch/device/no_cuda stand in. tools/unity.py says which files are compiled together; RINGDP_UNITY=0 compiles each
by itself. What the build was made for is written to ringdp/_build_info.py, which `import ringdp` compares with what it
finds.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import cuda_toolkit
import toolchain
import unity

ROOT = Path(__file__).resolve().parents[1]
TORCH_VERSION = toolchain.check_torch()

# torch looks for ninja on PATH only, and would compile one file at a time without it; pip puts it beside the Python.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

# An installed ringdp would be loaded by `import torch`; a build must not depend on what it is going to replace.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402

TOOLKIT, NO_KERNELS = cuda_toolkit.choose(TORCH_VERSION, torch.version.cuda)
if TOOLKIT is not None:
    os.environ["CUDA_HOME"] = str(TOOLKIT.root)  # torch would take a script that stands for nvcc at its word
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nvcc without a GPU, and minor versions, serve

from setuptools import Extension  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

CSRC = Path("ringdp/csrc")
CORE_FOLDERS = (
    "base",
    "transport",
    "link",
    "shared",
    "meet",
    "kernels",
    "codec",
    "device",
    "collective",
    "simulation",
    "membership",
    "engine",
)
# No -march: what is built here runs on other machines. No contraction: all ranks get the same bits whatever their CPU.
COMPILE_FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-g1"]
# For what binds classes to Python: pybind11's templates take long to optimise, and no time is spent in them.
BINDING_FLAGS = ["-O1"]
# torch's own flags take the conversions of the half types away; -U gives them back.
NVCC_FLAGS = [
    *cuda_toolkit.COMPILE_FLAGS,
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
TESTS_CORE = Path("tests/core")
# _core gets pybind11 internals of its own. It may then bind the same classes as _C, whichever pybind11 each is built
# with.
CORE_MACROS = [("PYBIND11_STDLIB", '"_ringdp_core"')]
# ninja follows includes, setuptools does not
HEADERS = [
    str(path)
    for folder in (Path("ringdp"), TESTS_CORE)
    for path in sorted(folder.rglob("*"))
    if path.suffix in (".h", ".inc", ".def")
]
# One per environment: its paths are in the compiler's command lines, and another command line means compiling again.
ENVIRONMENT = hashlib.sha256(f"{sys.prefix} {torch.__file__}".encode()).hexdigest()[:8]
BUILD_FOLDER = Path(
    "build", re.sub(r"[^\w.]", "_", f"{sys.implementation.cache_tag}-torch-{TORCH_VERSION}-{ENVIRONMENT}")
)


def sources(*folders: str, suffix: str = "cpp") -> list[str]:
    return [str(path) for path in unity.sources(*folders, suffix=suffix)]


CORE_MODULE = str(TESTS_CORE / "core_module.cpp")
CORE_UNITS = unity.core_units(*CORE_FOLDERS)
BINDING_UNITS, TORCH_UNITS = unity.torch_units()


def pybind11_include() -> str:
    """pip's pybind11 where it is installed; else the pybind11 folder of torch's headers, without its neighbours."""
    try:
        import pybind11
    except ImportError:
        link = BUILD_FOLDER / "pybind11" / "pybind11"
        link.parent.mkdir(parents=True, exist_ok=True)
        bundled = Path(torch.__file__).parent / "include" / "pybind11"
        if not link.is_symlink():
            link.symlink_to(bundled)
        return str(link.parent.resolve())
    return str(pybind11.get_include())


class BuildExt(BuildExtension):
    """BuildExtension with a folder per module, the core compiled once, and no work where nothing changed."""

    user_options: ClassVar = [
        *BuildExtension.user_options,
        ("core-only", None, "build only tests.core._core, in a checkout"),
        ("each-alone", None, "compile each file by itself for the compiler's messages; no module is made"),
    ]
    boolean_options: ClassVar = [*BuildExtension.boolean_options, "core-only", "each-alone"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.core_only = False
        self.each_alone = False
        self.core_is_compiled = False

    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder for in-place builds, editable installs and wheels (pip would use a fresh temporary one), so that
        # only the first of them compiles.
        self.build_temp = str(BUILD_FOLDER)
        only = "tests.core._core" if self.core_only else "" if self.inplace or self.each_alone else "ringdp._C"
        self.extensions: list[Any] = [e for e in self.extensions if only in ("", e.name)]

    def run(self) -> None:
        if os.environ.get("RINGDP_PACK_BUILT") == "1":
            self.pack_built()
            return
        try:
            self.compiler_version = toolchain.check_toolchain()
        except toolchain.SetupError as error:
            sys.exit(f"ringdp: {error}")
        if NO_KERNELS:
            sys.stdout.write(f"ringdp: {NO_KERNELS}\n")
            sys.stdout.flush()
        if not self.use_ninja:
            self.warn("ninja was not found, so one file is compiled at a time (`pip install ninja` helps)")
        os.environ.setdefault("MAX_JOBS", str(default_jobs()))
        BUILD_FOLDER.mkdir(parents=True, exist_ok=True)
        with open(BUILD_FOLDER / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                super().run()
            except RuntimeError as error:  # torch's, without more to say than what ninja has printed
                sys.exit(f"ringdp: {error}; the compiler's messages are above")
            if not self.each_alone:
                self.write_build_info()

    def pack_built(self) -> None:
        """Take the modules that `make build` left in ringdp/ as they are; the tests of the wheel compile nothing."""
        folder = Path(self.build_lib, "ringdp")
        folder.mkdir(parents=True, exist_ok=True)
        for name in [*(Path(self.get_ext_filename(ext.name)).name for ext in self.extensions), "_build_info.py"]:
            if not (ROOT / "ringdp" / name).exists():
                sys.exit(f"ringdp: RINGDP_PACK_BUILT=1 packs what is built, and ringdp/{name} is not: run `make build`")
            shutil.copy2(ROOT / "ringdp" / name, folder / name)

    def build_extensions(self) -> None:
        self.compiler.force = False  # ninja decides what to compile; link only what is older than its objects
        run_ninja = getattr(cpp_extension, "_run_ninja_build", None)
        if run_ninja is None:  # another torch may start ninja in another way: then the build takes longer, nothing else
            super().build_extensions()
            return

        def run_arranged(build_directory: str, *args: Any, **kwargs: Any) -> Any:
            arrange(Path(build_directory, "build.ninja"))
            return run_ninja(build_directory, *args, **kwargs)

        cpp_extension._run_ninja_build = run_arranged
        try:
            super().build_extensions()
        finally:
            cpp_extension._run_ninja_build = run_ninja

    def get_source_files(self) -> list[str]:
        """What a source distribution needs: the files themselves, not the units that include them."""
        return [path for path in super().get_source_files() if not path.startswith(str(unity.FOLDER))]

    def build_extension(self, ext: Extension) -> None:
        self.build_temp = str(BUILD_FOLDER / ext.name)
        self.quiet_headers(ext)
        if self.each_alone:
            self.check_each(ext)
            return
        ext.extra_objects = self.core_objects()
        self.relink_if_changed(ext)
        super().build_extension(ext)

    def check_each(self, ext: Extension) -> None:
        """Only the compiler's front end, which finds the include that a unity unit hides."""
        if unity.switched_on():
            sys.exit("ringdp: --each-alone needs RINGDP_UNITY=0 in the environment; `make compile-each` sets it")
        flags = {name: [*words, "-fsyntax-only"] for name, words in ext.extra_compile_args.items() if name == "cxx"}
        self.compiler.compile(
            [
                source
                for source in (*ext.sources, *(CORE_UNITS if ext.name == "tests.core._core" else ()))
                if source.endswith(".cpp")
            ],
            output_dir=str(BUILD_FOLDER / "each" / ext.name),
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=flags,
        )

    def quiet_headers(self, ext: Extension) -> None:
        """Other people's headers as system headers, whose warnings are theirs (torch's 60 a file would hide ours).

        Python's folders follow torch's in the same list: an -I would go first, and some installations have a pybind11
        of their own there.
        """
        ours = [str(ROOT / CSRC), str(ROOT / TESTS_CORE)]
        others = [folder for folder in [*ext.include_dirs, *self.compiler.include_dirs] if folder not in ours]
        ext.include_dirs = [folder for folder in ext.include_dirs if folder in ours]
        ext.extra_compile_args["cxx"] += [word for folder in others for word in ("-isystem", folder)]

    def core_objects(self) -> list[str]:
        """The core's objects, compiled for whichever module comes first."""
        folder = str(BUILD_FOLDER / "core")
        if not self.core_is_compiled:
            include_dirs, self.compiler.include_dirs = self.compiler.include_dirs, []
            self.compiler.compile(
                CORE_UNITS,
                output_dir=folder,
                include_dirs=[str(ROOT / CSRC)],
                extra_postargs={"cxx": list(COMPILE_FLAGS)},
            )
            self.compiler.include_dirs, self.core_is_compiled = include_dirs, True
        objects = self.compiler.object_filenames(CORE_UNITS, output_dir=folder)
        return [str(Path(o).resolve()) for o in objects]

    def relink_if_changed(self, ext: Extension) -> None:
        """Remove the module when its list of inputs is another than last time: file times cannot tell."""
        output = Path(self.get_ext_fullpath(ext.name))
        inputs = repr((ext.sources, ext.extra_objects, ext.libraries, ext.library_dirs, ext.extra_link_args))
        record = Path(self.build_temp, "inputs")
        record.parent.mkdir(parents=True, exist_ok=True)
        if not record.exists() or record.read_text() != inputs:
            output.unlink(missing_ok=True)
            record.write_text(inputs)

    def write_build_info(self) -> None:
        lines = [
            '"""What this build was made for; written by setup.py, compared by ringdp/_build.py."""',
            "",
            f"VERSION = {self.distribution.get_version()!r}",
            f"TORCH_VERSION = {str(torch.__version__)!r}",
            f"PYTHON_TAG = {sys.implementation.cache_tag!r}",
            f"COMPILER = {self.compiler_version!r}",
            f"CUDA = {TOOLKIT.version if TOOLKIT else None!r}",
        ]
        text = "\n".join(lines) + "\n"
        folders = [Path(self.build_lib, "ringdp")] + ([ROOT / "ringdp"] if self.inplace else [])
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "_build_info.py"
            if self.core_only and path.exists():
                continue  # it speaks of the ringdp._C that lies there
            if not path.exists() or path.read_text() != text:
                path.write_text(text)


class BuildPy(build_py):
    """build_py, starting from nothing but ringdp._C: it would leave in the wheel what an earlier build put there."""

    def run(self) -> None:
        module = Path(self.build_lib, self.get_finalized_command("build_ext").get_ext_filename("ringdp._C"))
        for path in sorted(Path(self.build_lib).rglob("*"), reverse=True):
            if path.is_file() and path != module:
                path.unlink()
        super().run()


def arrange(ninja_file: Path) -> None:
    """Put what takes longest first, so that no core is left alone with it, and give the bindings flags of their own.

    setuptools sorts sources by name, and torch compiles all files of a module with the same flags.
    """
    edges: dict[str, str] = {}
    others = []
    for line in ninja_file.read_text().splitlines():
        source = line.rpartition(f" {ROOT}/")[2]
        if line.startswith("build ") and Path(source).is_file():
            edges[source] = line
        else:
            others.append(line)
    bindings = (CORE_MODULE, *BINDING_UNITS)
    lines = []
    for source in sorted(edges, key=lambda source: (source not in bindings, -unity.size_of(Path(source)))):
        lines.append(edges[source])
        if source in bindings:
            lines.append(f"  post_cflags = $post_cflags {' '.join(BINDING_FLAGS)}")
    ninja_file.write_text("\n".join([*others, *lines]) + "\n")


def default_jobs() -> int:
    """One per usable core, as far as 2 GiB each go (a file that includes torch takes about 1.5)."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib / 2)))


def extensions() -> list[Any]:
    core = Extension(
        "tests.core._core",
        [str(path) for path in sorted(TESTS_CORE.glob("*.cpp"))],
        depends=[*HEADERS, *sources(*CORE_FOLDERS)],
        include_dirs=[str(ROOT / CSRC), str(ROOT / TESTS_CORE), pybind11_include()],
        define_macros=CORE_MACROS,
        extra_compile_args={"cxx": list(COMPILE_FLAGS)},
        libraries=["rt", "pthread", "dl"],
        language="c++",
    )
    return [torch_side(TOOLKIT), core]


def torch_side(toolkit: cuda_toolkit.Toolkit | None) -> Any:
    # CppExtension brings torch's own pybind11, whose internals are not those of pip's: passing a c10d::Store through
    # the wrong one fails at run time. So pip's never stands on this include path.
    shared = {
        "depends": [*HEADERS, *sources(*CORE_FOLDERS), *map(str, unity.torch_sources())],
        "include_dirs": [str(ROOT / CSRC)],
    }
    flags = {"cxx": list(COMPILE_FLAGS)}
    if toolkit is None:
        units = [*BINDING_UNITS, *TORCH_UNITS, *sources("torch/device/no_cuda", "cuda")]
        return CppExtension("ringdp._C", units, extra_compile_args=flags, **shared)
    # torch's headers want those of CUDA's other libraries, too, which a toolkit may lack and pip's packages have.
    packages = sorted(Path(torch.__file__).parent.parent.glob(f"nvidia/cu{cuda_toolkit.major(toolkit.version)}"))
    shared["include_dirs"] += [str(p) for p in (*toolkit.includes, *(p / "include" for p in packages))]
    extension = CUDAExtension(
        "ringdp._C",
        # In cuda/, only absent.cpp is C++.
        [*BINDING_UNITS, *TORCH_UNITS, *sources("torch/device/cuda"), *sources("cuda", suffix="cu")],
        extra_compile_args=flags | {"nvcc": [*NVCC_FLAGS, *architecture_flags(toolkit)]},
        **shared,
    )
    runtime = cuda_toolkit.runtime_library([*toolkit.libraries, *(p / "lib" for p in packages)])
    if runtime is not None:
        extension.libraries.remove("cudart")
        extension.extra_link_args.append(str(runtime))
    return extension


def architecture_flags(toolkit: cuda_toolkit.Toolkit) -> list[str]:
    """None where TORCH_CUDA_ARCH_LIST is set: BuildExtension reads it."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return []
    return cuda_toolkit.architecture_flags(torch._C._cuda_getArchFlags() or "", toolkit.targets)


def arguments() -> dict[str, Any]:
    """What setuptools.setup is given."""
    return {"ext_modules": extensions(), "cmdclass": {"build_ext": BuildExt, "build_py": BuildPy}}

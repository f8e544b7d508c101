"""Harnesses: one file each, whose HARNESS says how to launch it, and the runtimes that a sandbox mounts for them.

    python -m harnesses list               the names that --harness takes, and what each installs
    python -m harnesses build [NAME...]    builds runtimes into the cache now, not at first use; prints folder, MB, seconds
    python -m harnesses check [NAME...]    starts each in a sandbox without network and compares the version that it tells

Inside, a harness's package stands at APP, the other runtimes at PATHS[need], this folder at PATHS["code"]. The Python
runtime is a copy of an interpreter with its own loader and shared libraries: it works in an image without Python or with
another libc. The argv prefix PYTHON starts it and needs no environment variable that would leak into the commands that
an agent runs. Node and the native harnesses keep the image's loader (under another one they would not find themselves at
/proc/self/exe): they need glibc 2.28 and, Node, libstdc++: Debian 10, Ubuntu 20.04, RHEL 8 and later, with apt or dnf
in them; not Alpine (musl), busybox and other images without these.
The cache is $HARNESS_RL_CACHE (default ~/.cache/harness-rl); a runtime's folder is named by what it was made from.
"""
import compileall
import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ARCH = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())    # as npm names it
BEFORE = "2026-11-30"                           # what a package depends on is taken as of this day
PATHS = {"python": "/opt/harness/python", "node": "/opt/harness/node", "code": "/opt/harness/code"}  # need -> inside
APP = "/opt/harness/app"
MODULES, NODE = f"{APP}/node_modules", f"{PATHS['node']}/node_modules/node-linux-{ARCH}/bin/node"
PACKAGES = {"node": f"npm:node-linux-{ARCH}@24.21.0"}
LEFT_OUT = ("test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages",
            "config-*", "*.opt-*.pyc", "*.a", "_test*.so", "_ctypes_test*.so", "_tkinter*.so")


def python_argv(root) -> list[str]:
    """How to start the runtime that stands at root: it looks at no environment variable, and text is UTF-8."""
    return [f"{root}/lib/loader", "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I", "-S", "-X", "utf8"]


PYTHON = python_argv(PATHS["python"])


@dataclass(frozen=True)
class Harness:
    name: str
    argv: list[str]                                 # run with cwd = the task's workdir
    env: dict[str, str] = field(default_factory=dict)       # beside INSTRUCTION and CONTEXT_TOKENS, which all get
    needs: tuple[str, ...] = ("python",)            # runtimes, keys of PATHS; the code is always mounted
    package: str = ""                               # npm:NAME@VERSION, installed at APP
    memory_mb: int = 0                              # what it takes itself, on top of the task's limit
    version: tuple[str, ...] = ()                   # argv that prints the version, for check
    overlong_exit: int | None = None                # exit status that means: out of turns, no final answer
    demonstrate: Callable[[list[str]], list[str]] | None = None     # commands -> the texts a policy samples to run them

    def mounts(self) -> dict[Path, str]:
        """Folders to mount read-only: host -> inside."""
        app = {runtime(self.package): APP} if self.package else {}
        return app | {runtime(need): PATHS[need] for need in (*self.needs, "code")}


def launch(files: dict[str, str], *command: str) -> list[str]:
    """argv: forward.py around launch.py, which writes the files into a folder of its own and becomes the command."""
    return [*PYTHON, f"{PATHS['code']}/forward.py", *PYTHON, f"{PATHS['code']}/launch.py", json.dumps(files), *command]


def tool_calls(tool: str, argument: str, **fixed) -> Callable[[list[str]], list[str]]:
    """For `demonstrate`: each command as a call of the harness's shell tool, in Hermes's words, then a final answer."""
    def phrase(command):
        call = json.dumps({"name": tool, "arguments": {argument: command} | fixed}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    return lambda commands: [*map(phrase, commands), "Done."]


def names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nHARNESS = " in path.read_text())


def load(name: str) -> Harness:
    if name not in names():
        raise ValueError(f"unknown harness {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"harnesses.{name}").HARNESS


@functools.cache
def runtime(need: str) -> Path:
    """The host folder of a runtime, built into the cache if it is not there. Builds may race: the first one wins."""
    if need == "code":
        return Path(__file__).resolve().parent
    need = PACKAGES.get(need, need)
    kind, _, spec = need.partition(":")
    if kind == "python":
        binary, stdlib = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
        sources = [binary, *sorted(stdlib.glob("*.py")), *sorted(stdlib.glob("lib-dynload/*.so"))]
        stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
        recipe = (LEFT_OUT, python_argv(""), inspect.getsource(build_python), inspect.getsource(shared_libraries), stamps)
        name, build = f"python-{sys.version.split()[0]}", functools.partial(build_python, binary=binary, stdlib=stdlib)
    elif kind == "npm":
        recipe = (spec, BEFORE, inspect.getsource(build_npm))
        name, build = re.sub(r"[^\w.-]+", "-", spec).strip("-"), functools.partial(build_npm, spec=spec)
    else:
        raise ValueError(f"unknown runtime {need!r}; there are: {', '.join(PATHS)}, npm:NAME@VERSION")
    cache = Path(os.environ.get("HARNESS_RL_CACHE") or Path.home() / ".cache" / "harness-rl").absolute()
    folder = cache / f"{name}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as building:
            build(Path(building) / name)
            try:
                os.rename(Path(building) / name, folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def build_npm(out: Path, spec: str):
    """node_modules/; no package's scripts run: what they would put in place (native binaries) is its own package."""
    command = ["npm", "install", "--prefix", out, "--before", BEFORE, "--ignore-scripts", "--no-audit", "--no-fund",
               "--loglevel", "error", spec]
    out.mkdir()
    if not shutil.which("npm"):
        raise FileNotFoundError(f"npm is missing, and {spec} is installed with it: apt-get install npm")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"npm cannot install {spec}: {result.stderr.strip()[-500:]}")


def build_python(out: Path, binary: Path, stdlib: Path):
    """bin/python3; lib/pythonX.Y, which Python finds from the place of its binary; lib/*.so*; lib/loader."""
    (out / "bin").mkdir(parents=True)
    shutil.copy2(binary, out / "bin" / "python3")
    library = out / "lib" / stdlib.name
    shutil.copytree(stdlib, library, ignore=shutil.ignore_patterns(*LEFT_OUT))
    compileall.compile_dir(library, quiet=2)        # where the .pyc is missing: none can be written once it is mounted
    extensions = list(library.glob("lib-dynload/*.so"))
    for path in shared_libraries([binary, *extensions]):
        shutil.copy2(path, out / "lib" / ("loader" if path.name.startswith("ld-") else path.name))
    if shutil.which("strip"):                       # debug symbols can be two thirds of an interpreter
        binaries = [out / "bin" / "python3", *extensions, *out.glob("lib/*.so*")]
        subprocess.run(["strip", "-g", *binaries], stderr=subprocess.DEVNULL)
    check = [*python_argv(out), "-c", "import json, socket, ssl, subprocess, threading, zlib"]
    result = subprocess.run(check, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the copy of {binary} does not start, use another Python: {result.stderr[-300:]}")


def shared_libraries(files: list[Path]) -> set[Path]:
    """All that ldd finds for these files, with the loader; and libgcc_s, which glibc opens when it cancels a thread."""
    lines = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout.splitlines()
    found = {Path(word) for line in lines for word in line.split() if word.startswith("/") and not word.endswith(":")}
    beside_libc = [path.with_name("libgcc_s.so.1") for path in found if path.name == "libc.so.6"]
    return found | {path for path in beside_libc if path.exists()}

"""Harnesses: one file each, whose HARNESS says how to launch it, and the runtimes that a sandbox mounts for them.

    python -m harnesses list               the names that --harness takes, and what each installs
    python -m harnesses build [NAME...]    builds runtimes into the cache, not at first use; prints folder, MB, seconds
    python -m harnesses check [NAME...]    starts each in a sandbox without network; its version must be the pinned one

Inside, a harness's package stands at APP, the other runtimes at PATHS[need], this folder at PATHS["code"]. The Python
runtime is a copy of an interpreter with its own loader and shared libraries: it and the harnesses in Python work in an
image without Python or with another libc. The argv prefix PYTHON starts it and needs no environment variable that would
leak into the commands that an agent runs. Node and native harnesses keep the image's loader (under another they would
not find themselves at /proc/self/exe): they need glibc 2.28 and, Node, libstdc++, as in Debian 10, Ubuntu 20.04 or
RHEL 8 and later; not Alpine (musl), busybox or other images without these. Codex is static.
The cache is $HARNESS_RL_CACHE (default ~/.cache/harness-rl); a runtime's folder is named by what it was made from.
"""
import contextlib, functools, hashlib, importlib, inspect, json, os, platform, re, shutil, subprocess, sys, \
    tempfile, time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ARCH = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())    # as npm names it
BEFORE = "2026-11-30"                           # what a package depends on is taken as of this day
APP = "/opt/harness/app"
PATHS = {"python": "/opt/harness/python", "python3.12": "/opt/harness/python", "node": "/opt/harness/node",
         "code": "/opt/harness/code"}           # need -> where it stands inside; python3.12: at least that
MODULES, NODE = f"{APP}/node_modules", f"{PATHS['node']}/node_modules/node-linux-{ARCH}/bin/node"
UV = "uv==0.13.9"
PACKAGES = {"node": f"npm:node-linux-{ARCH}@24.21.0"}
LEFT_OUT = ("test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages",
            "config-*", "*.opt-*.pyc", "*.a", "_test*.so", "_ctypes_test*.so", "_tkinter*.so")


def python_argv(root) -> list[str]:
    """How to start the runtime that stands at root: it looks at no environment variable, and text is UTF-8."""
    return [f"{root}/lib/loader", "--library-path", f"{root}/lib", f"{root}/bin/python3", "-I", "-S", "-X", "utf8"]


PYTHON = python_argv(PATHS["python"])


def python_app(statement: str) -> list[str]:
    """How to run a statement with the modules of a harness's package."""
    libraries = f"{PATHS['python']}/lib:{APP}/lib"
    return [*(libraries if word == f"{PATHS['python']}/lib" else word for word in PYTHON),
            "-c", f"import sys; sys.path.append({f'{APP}/site-packages'!r}); {statement}"]


@dataclass(frozen=True)
class Harness:
    argv: list[str]                                 # run with cwd = the task's workdir
    env: dict[str, str] = field(default_factory=dict)       # beside INSTRUCTION and CONTEXT_TOKENS, which all get
    needs: tuple[str, ...] = ("python",)            # runtimes, keys of PATHS; the code is always mounted
    package: str = ""                               # npm:NAME@VERSION, pip:NAME==VERSION ..., installed at APP
    memory_mb: int = 0                              # on top of the task's; bubblewrap counts what is reserved, too
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


def interpreter(minimum: str, may_install=True) -> tuple[str, Path, Path]:
    """(version, binary, standard library) of a Python of at least this version: the running one if it will do, or one
    that stands on PATH, or was installed by pyenv or uv; else one that uv installs now."""
    versions = [f"python3.{minor}" for minor in range(int(minimum.partition(".")[2]), 20)]
    found = [path for name in versions for path in (
        shutil.which(name), *Path.home().glob(f".pyenv/versions/*/bin/{name}"),
        *Path.home().glob(f".local/share/uv/python/cpython-*/bin/{name}")) if path]
    ask = "import sys, sysconfig as s; print(sys.version.split()[0], sys.executable, s.get_path('stdlib'), sep='\\n')"
    for path in [sys.executable, *found]:
        answer = subprocess.run([path, "-c", ask], capture_output=True, text=True).stdout.splitlines()
        if len(answer) == 3 and int(answer[0].split(".")[1]) >= int(minimum.partition(".")[2]):
            return answer[0], Path(answer[1]).resolve(), Path(answer[2])
    try:
        assert may_install, "after its installation it is still not found"
        with tempfile.TemporaryDirectory() as tools:
            install([sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, UV], UV)
            install([f"{tools}/bin/uv", "python", "install", minimum], f"Python {minimum} with uv")
    except (AssertionError, OSError) as error:
        raise FileNotFoundError(f"no Python >= {minimum} is here; install one (apt-get, pyenv, conda) such that "
                                f"python{minimum} stands on PATH: {error}") from None
    return interpreter(minimum, may_install=False)


def cache() -> Path:
    return Path(os.environ.get("HARNESS_RL_CACHE") or Path.home() / ".cache" / "harness-rl").absolute()


@functools.cache
def runtime(need: str) -> Path:
    """The host folder of a runtime, built into the cache if it is not there. Builds may race: the first one wins."""
    if need == "code":
        return Path(__file__).resolve().parent
    kind, _, spec = PACKAGES.get(need, need).partition(":")
    kind, minimum = re.fullmatch(r"(\w+?)(3\.\d+)?", kind).groups()
    name = re.sub(r"[^\w.-]+", "-", spec).strip("-")
    if kind == "python":
        version, binary, stdlib = interpreter(minimum or "3.11")
        sources = [binary, *sorted(stdlib.glob("*.py")), *sorted(stdlib.glob("lib-dynload/*.so"))]
        stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
        recipe = (stamps, LEFT_OUT, python_argv(""), *map(inspect.getsource, (build_python, shared_libraries)))
        name, build = f"python-{version}", functools.partial(build_python, binary=binary, stdlib=stdlib)
    elif kind == "npm":
        recipe = (spec, BEFORE, inspect.getsource(build_npm))
        build = functools.partial(build_npm, spec=spec)
    elif kind == "pip":
        version, binary, _ = interpreter(minimum or "3.11")
        recipe = (spec, BEFORE, version, UV, *map(inspect.getsource, (build_pip, shared_libraries)))
        build = functools.partial(build_pip, specs=spec.split(), binary=binary)
    else:
        raise ValueError(f"unknown runtime {need!r}; there are: {', '.join(PATHS)}, npm:NAME@1.0, pip:NAME==1.0")
    folder = cache() / f"{name}-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]}"
    if not folder.exists():
        cache().mkdir(parents=True, exist_ok=True)
        for left in cache().glob("building-*"):     # by a build that was killed; another may be under way
            with contextlib.suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - 86400:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache(), prefix="building-") as building:
            build(Path(building) / name)
            subprocess.run(["chmod", "-R", "a+rX", building], check=True)       # whatever our umask, for any sandbox
            try:
                os.rename(Path(building) / name, folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def install(command: list, what: str):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"cannot install {what}: {result.stderr.strip()[-500:]}")


def build_npm(out: Path, spec: str):
    """node_modules/. Only the package's own scripts run: a binary that others would put in place is itself a package,
    so name that one."""
    if not shutil.which("npm"):
        raise FileNotFoundError(f"npm is missing, and {spec} is installed with it: apt-get install npm")
    out.mkdir()
    install(["npm", "install", "--prefix", out, "--before", BEFORE, "--ignore-scripts", "--no-audit", "--no-fund",
             "--loglevel", "error", spec], spec)
    name = spec.rpartition("@")[0]
    if "postinstall" in json.loads((out / "node_modules" / name / "package.json").read_text()).get("scripts", {}):
        node = runtime("node") / NODE.removeprefix(f"{PATHS['node']}/")
        path = f"{node.parent}:{os.environ['PATH']}"
        install(["env", f"PATH={path}", "npm", "rebuild", "--prefix", out, "--ignore-scripts=false", name], spec)


def build_pip(out: Path, specs: list[str], binary: Path):
    """site-packages/ for an interpreter; lib/*.so*, the system's libraries that its extensions need."""
    with tempfile.TemporaryDirectory(dir=out.parent) as tools:
        install([sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, UV], UV)
        install([f"{tools}/bin/uv", "pip", "install", "--quiet", "--link-mode", "copy", "--compile-bytecode",
                 "--python", binary, "--exclude-newer", BEFORE, "--target", out / "site-packages", *specs], str(specs))
    (out / "lib").mkdir()
    for path in shared_libraries(list(out.rglob("*.so"))):
        if not path.is_relative_to(out) and not path.name.startswith("ld-"):
            shutil.copy2(path, out / "lib")


def build_python(out: Path, binary: Path, stdlib: Path):
    """bin/python3; lib/pythonX.Y, which Python finds from the place of its binary; lib/*.so*; lib/loader."""
    (out / "bin").mkdir(parents=True)
    shutil.copy2(binary, out / "bin" / "python3")
    library = out / "lib" / stdlib.name
    shutil.copytree(stdlib, library, ignore=shutil.ignore_patterns(*LEFT_OUT))
    extensions = list(library.glob("lib-dynload/*.so"))
    for path in shared_libraries([binary, *extensions]):
        shutil.copy2(path, out / "lib" / ("loader" if path.name.startswith("ld-") else path.name))
    if shutil.which("strip"):                       # debug symbols can be two thirds of an interpreter
        binaries = [out / "bin" / "python3", *extensions, *out.glob("lib/*.so*")]
        subprocess.run(["strip", "-g", *binaries], stderr=subprocess.DEVNULL)
    # .pyc files where they are missing: none can be written once it is mounted
    check = ("import compileall, json, socket, ssl, subprocess, threading, zlib; "
             f"compileall.compile_dir({str(library)!r}, quiet=2)")
    result = subprocess.run([*python_argv(out), "-c", check], capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"the copy of {binary} does not start, use another Python: {result.stderr[-300:]}")


def shared_libraries(files: list[Path]) -> set[Path]:
    """All that ldd finds for these files, with the loader; and libgcc_s, which glibc opens when it cancels a thread."""
    lines = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout.splitlines()
    found = {Path(word) for line in lines for word in line.split() if word.startswith("/") and not word.endswith(":")}
    beside_libc = [path.with_name("libgcc_s.so.1") for path in found if path.name == "libc.so.6"]
    return found | {path for path in beside_libc if path.exists()}

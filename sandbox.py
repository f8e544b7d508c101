"""A sandbox: the place where an agent harness works on a task, under Docker or, without a daemon, bubblewrap.

    box = SANDBOXES[choose("auto")](environment(task_dir), run_id="r1", name="task-0", socket=path)
    with box:                                       # start(), and stop() whatever happens
        result = box.exec(["bash", "-c", "make"], timeout_s=60)

Calls block and may come from many threads. `SandboxError` is a fault of the machinery (daemon gone, disk full, image
missing); what a process inside did wrong stands in `Result`, or is a FileNotFoundError or ValueError of `get`, `carry`.

Covered: no network but a lone `lo` (no host ports, neighbours, DNS); one unix socket, /run/model.sock, as the only way
out; the host's files invisible but for read-only runtimes; memory, CPU, process, open file, disk and output limits;
time limits that kill every process in the sandbox; copies that neither follow links on the host nor fill its disk; a
workspace that reaches the verifier without what would run there before the tests (`carry`); a full disk of the host as
a SandboxError; removal of all that a dead run left, whatever killed it; a daemon that dies or restarts (what runs then
fails with a SandboxError, what starts waits 30 s for it); tasks of FROM, WORKDIR, COPY and ENV lines without an image
build, alike on both.
Not covered: kernel exploits; disk use between two looks, 2 s apart, and by files that are deleted and still open; a
daemon that hangs instead of failing; side channels (load, /proc/cpuinfo); Dockerfiles that only BuildKit builds; tests
that themselves run the agent's code in their own process or under their own user.
Docker, further: an exec fails (126) while background processes fill the process limit; `kill()` ends them. `internet`:
a bridge of the run's own without traffic between sandboxes; the host's ports can then be reached at its gateway. Where
the containers' files cannot be looked at (by an ordinary user, on another machine, in containerd's store) the disk
limit is what the daemon counts, and `changed` finds nothing, as is said once on stderr.
Docker on another machine (a DOCKER_HOST that is no unix socket): runtimes go there once, as volumes, which `reap`
removes when their folder here is another by then; the model's socket is carried over an exec's standard input and
output (harnesses/relay.py): no network inside, as here, and no port to open on either side. An agent that ends all
processes ends the relay, too.
bubblewrap, further: no image is built: FROM debian or ubuntu, any tag, is the host's own /usr; no CPU limit; memory is
limited per process; processes run as an ordinary user, not root, on a read-only root (writable: the workdir, WRITABLE,
folders given to `put`); background processes end with their exec; for an ordinary user on the host the process limit
holds per exec, not per sandbox.
"""
import contextlib, dataclasses, errno, fcntl, functools, hashlib, io, itertools, os, posixpath, re, resource, select, \
    shlex, shutil, signal, socket, stat, subprocess, sys, tarfile, tempfile, threading, time, types, uuid
from pathlib import Path

import docker, requests, urllib3

import harnesses, workspace
from harnesses import relay

TAIL_BYTES = 64 << 10   # output of an exec that Result keeps
LOG_BYTES = 10 << 20    # output of an exec that its log file keeps
GET_BYTES = 1 << 30     # largest archive that leaves a sandbox; of a workspace, beside what its image has there
GET_FILES = 200_000     # most files and folders in one, likewise
IN_THE_WAY = re.compile("not a directory|too many (links|levels)")      # a file or link in a folder's place
DISK_RESERVE_MB = 256   # of the host: less, and every sandbox fails
OPEN_FILES = 4096       # a process
SOCKET = "/run/model.sock"
SCRATCH = ("/tmp", "/var/tmp", "/run", "/dev", "/proc", "/sys", "/opt/harness", "/solution", "/var/log", "/var/cache")


class SandboxError(RuntimeError):
    """A fault of the infrastructure, or a task that this kind of sandbox cannot serve: never the agent's doing."""


@dataclasses.dataclass
class Environment:
    base: str                           # image name; bubblewrap: a root folder, or of debian, ubuntu, harness-rl/base
                                        # (any tag) and "host" the host's own /usr
    workdir: str = ""                   # "" = the image's own
    copies: list = dataclasses.field(default_factory=list)        # [(host path, path inside, else below the workdir)]
    folders: tuple = ("/logs/agent", "/logs/artifacts")           # made at start, for any user
    env: dict = dataclasses.field(default_factory=dict)
    dockerfile: Path | None = None      # folder of a Dockerfile that must be built, None = `base` serves as it is
    build_line: str = ""                # the line that makes the build necessary
    build_timeout_s: float = 3600
    base_images: dict = dataclasses.field(default_factory=dict)   # image name in FROM -> local stand-in
    internet: bool = False              # a network of the run's own, Docker only
    heir_of: object = None              # bubblewrap: a frozen sandbox whose files the one that starts takes over
    task: str = ""                      # for messages


@dataclasses.dataclass
class Result:
    exit_code: int      # 137 when killed, also by the time limit
    timed_out: bool
    output: str         # stdout and stderr, the last TAIL_BYTES
    is_over_disk: bool = False   # killed for what it had written


# ---- tasks: environment/Dockerfile ----

# Lines that can be applied at start: no variables, flags, wildcards, stages or here-documents.
PLAIN = re.compile(r"(?i)(FROM|WORKDIR)\s+[^\s$'\"-][^\s$'\"]*|COPY\s+(?=[^\s\[-])[^$*?\\<\[]*|ENV\s+\w+=[^$\\]*|"
                   r"(CMD|LABEL|EXPOSE)\s.*")            # of no use to a sandbox


def environment(task_dir, base_images=None, docker_image=None):
    """Read a task's environment/Dockerfile. One of FROM, WORKDIR, COPY and ENV lines alone (and of CMD, LABEL, EXPOSE,
    which do nothing here) is applied at start, any other is built, by Docker only. `docker_image`: the ready image that
    task.toml names instead."""
    folder, base_images = Path(task_dir) / "environment", base_images or {}
    env = Environment("", base_images=base_images, task=Path(task_dir).name)
    if docker_image:
        env.base = base_images.get(docker_image, docker_image)
        if not (folder / "Dockerfile").exists() and folder.is_dir():     # its files go into the workdir, as Harbor's do
            env.copies = [(path, path.name) for path, _ in _copies(folder, [*sorted(os.listdir(folder)), "./"], "/")]
        return env
    text = re.sub(r"(?m)^\s*#.*$", "", (folder / "Dockerfile").read_text())
    lines = [line.strip() for line in re.sub(r"\\[ \t]*\n\s*", " ", text).splitlines() if line.strip()]
    stages = [line for line in lines if re.match(r"(?i)FROM\s", line)]
    if not stages: raise ValueError(f"{folder}/Dockerfile has no FROM line")
    needs_build = [line for line in lines if not PLAIN.fullmatch(line)] + stages[1:]
    if needs_build or (folder / ".dockerignore").exists():
        env.dockerfile, env.build_line = folder, (needs_build or [".dockerignore"])[0][:80]
    for line in lines:
        word, rest = (line.split(None, 1) + [""])[:2]
        word = word.upper()
        if word == "FROM":
            name = [w for w in rest.split() if not w.startswith("--")][0]
            env.base, env.workdir = base_images.get(name, name), ""
        elif word == "WORKDIR" and "$" not in rest:
            env.workdir = posixpath.normpath(posixpath.join(env.workdir or "/", rest))
        elif word == "ENV" and not env.dockerfile:
            env.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "COPY" and not env.dockerfile:
            env.copies += _copies(folder, rest.split(), env.workdir or "/")
    if env.dockerfile: env.workdir = ""                     # the image that is built knows its own
    return env


def _copies(folder, words, workdir):
    """[(host path, inside path)] of one COPY line; of a folder the contents are copied, as Docker does."""
    *sources, target = words
    inside, root, copies = posixpath.normpath(posixpath.join(workdir, target)), folder.resolve(), []
    is_folder = (target.endswith("/") or len(sources) > 1 or inside in WRITABLE
                 or f"{workdir}/".startswith(inside.rstrip("/") + "/"))
    for source in sources:
        host = folder / source.lstrip("/")
        for path in [host, *host.rglob("*")]:
            if not path.resolve().is_relative_to(root) or (path.is_symlink() and os.path.isabs(os.readlink(path))):
                raise ValueError(f"{folder}/Dockerfile: COPY {source}: {path} leads out of the environment folder")
        if not host.exists(): raise FileNotFoundError(f"{folder}/Dockerfile: COPY {source}: there is no {host}")
        copies.append((host, posixpath.join(inside, host.name) if is_folder and not host.is_dir() else inside))
    return copies


# ---- owners: a sandbox outlives no run ----

def _start_ticks(pid):
    """When a process started, in ticks since boot; "" when it is dead (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _owner(pid):
    """machine.boot.pid.start: a process id means something within one host name, pid namespace and boot only."""
    machine = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{hashlib.sha256(machine.encode()).hexdigest()[:8]}.{boot}.{pid}.{_start_ticks(pid)}"


def _is_dead(owner):
    """Has the process that made a sandbox ended? False for owners on other machines: not ours to judge."""
    now = _owner(owner.split(".")[2])
    return owner.split(".")[0] == now.split(".")[0] and owner != now


def _safe(name):
    return re.sub(r"[^a-zA-Z0-9-]", "-", name)


def reap(run_id=None):
    """Remove the sandboxes of one run, or (None: at start-up) all that dead processes left. Returns how much."""
    def is_ours(run, owner):
        return _is_dead(owner) if run_id is None else run == _safe(run_id)
    num_removed = 0
    for path in Path(tempfile.gettempdir()).glob("harness-rl_*_*.*.*.*_*"):
        with contextlib.suppress(FileNotFoundError):   # another process may reap as well
            if path.lstat().st_uid == os.geteuid() and is_ours(*path.name.split("_")[1:3]):
                num_removed += 1
                for remove in (_end_bwrap, _remove_folder, _end_bwrap):   # again: of a command that began meanwhile
                    remove(path)
    for path in [] if run_id else {p for place in {tempfile.gettempdir(), "/tmp"} for p in Path(place).glob("hrl-*")}:
        with contextlib.suppress(OSError), open(path / ".lock") as lock:   # of a proxy, which holds it while it lives
            if time.time() - os.fstat(lock.fileno()).st_mtime > 5:         # else it may be about to take it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                num_removed += 1
                _end_engine(path)
                _remove_folder(path)
    with contextlib.suppress(SandboxError), _faults("reap"):   # no daemon: nothing of ours runs there
        api, labelled = _client().api, {"label": "harness_rl.run"}
        for found, remove in ((api.containers(all=True, filters=labelled), _remove_container),
                              (api.networks(filters=labelled), api.remove_network),
                              (api.images(filters=labelled), functools.partial(api.remove_image, force=True))):
            for row in found:
                if is_ours(row["Labels"]["harness_rl.run"], row["Labels"]["harness_rl.owner"]):
                    num_removed += 1
                    with contextlib.suppress(docker.errors.APIError):   # gone, or in use for a moment
                        remove(row["Id"])
        for row in [] if run_id else api.volumes(filters={"label": "harness_rl.folder"})["Volumes"] or []:
            folder, maker = (row["Labels"][f"harness_rl.{key}"] for key in ("folder", "maker"))
            if maker == _owner(os.getpid()).partition(".")[0] and row["Name"] != _volume_name(folder):
                with contextlib.suppress(docker.errors.APIError): api.remove_volume(row["Name"])   # 409: it is in use
    return num_removed


def alive(run_id):
    """How many sandboxes of a run there are, running or not, as the machine and the daemon count them."""
    num = len(list(Path(tempfile.gettempdir()).glob(f"harness-rl_{_safe(run_id)}_*")))
    with contextlib.suppress(SandboxError), _faults("count"):   # no daemon: nothing of ours runs there
        num += len(_client().api.containers(all=True, filters={"label": f"harness_rl.run={_safe(run_id)}"}))
    return num


def choose(kind="auto"):
    """"docker" where the daemon answers, else "bubblewrap" where it really runs; a kind that is asked for must work."""
    assert kind in ("auto", *SANDBOXES), f"sandbox {kind!r} is unknown; choose auto, {', '.join(SANDBOXES)}"
    problems = []
    for name in SANDBOXES if kind == "auto" else [kind]:
        if not (problem := SANDBOXES[name].problem()): return name
        problems.append(problem)
    raise SandboxError("; ".join(problems))


# ---- what both kinds share ----

@dataclasses.dataclass
class Sandbox:
    env: Environment
    _: dataclasses.KW_ONLY
    run_id: str                    # of this process: reap(run_id) removes all of it
    name: str
    runtimes: dict = dataclasses.field(default_factory=dict)   # {host folder: inside folder}, read-only
    socket: str | Path | None = None   # unix socket on the host -> /run/model.sock; must stay until stop()
    memory_mb: int = 4096
    cpus: float = 2
    pids: int = 512                # processes and threads
    disk_mb: int = 10240           # what it may write, in all
    workdir: str = dataclasses.field(default="", init=False)   # known from start() on
    mounts: dict = dataclasses.field(default_factory=dict, init=False)         # {inside folder: where the host has it}
    place: object = dataclasses.field(default_factory=tempfile.gettempdir, init=False)   # its disk is the one watched

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, kind, *_):
        with contextlib.suppress(*[SandboxError] * bool(kind)):   # which may be why it does not stop, and tells more
            self.stop()

    def start(self):
        """Start, with the task's copies in place; nothing is left behind when that fails."""
        if self.socket:
            assert Path(self.socket).is_socket(), f"{self.socket} is no unix socket; start the proxy first"
            os.chmod(self.socket, 0o666)   # the user inside is another one; on the host its folder guards the socket
        try:
            with _faults(f"start {self.name}"): self._start()
            self._put(self._placed(), self.env.folders)
            self.started_s = time.time()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def _placed(self):
        """The task's copies, by their paths from / on."""
        return [(host, posixpath.normpath(posixpath.join(self.workdir, inside))) for host, inside in self.env.copies]

    def exec(self, argv, *, env=None, cwd=None, timeout_s=None, log=None, user="", clock=time.monotonic):
        """Run a command to its end. At the time limit, or past the disk limit, every process in the sandbox is killed;
        its files stay. `user`: Docker only. `clock`: by which the time limit goes; it may stand still."""
        ended, reason, deadline = threading.Event(), [], clock() + (timeout_s or threading.TIMEOUT_MAX)
        watcher = threading.Thread(target=self._watch, args=(ended, reason, clock, deadline), daemon=True)
        self.is_killed = False
        with _faults(f"exec in {self.name}"):
            chunks, poll = self._run(list(argv), env or {}, cwd or self.workdir, user=user)
            watcher.start()
            try:
                output = _drain(chunks, log)
                while (code := poll()) is None and not reason:   # it may close its output and go on
                    time.sleep(0.005)
            finally:
                ended.set()
        if (left_mb := self._host_mb()) < DISK_RESERVE_MB or reason == ["host"]:   # others may have made room since
            raise SandboxError(f"{self.name}: disk full: {left_mb} MB left on the file system of {self.place}")
        if reason:
            watcher.join()   # Docker: the container is up again
            return Result(137, reason == ["time"], output, reason == ["disk"])
        if code in (137, -9) and not self.is_killed and self._has_ended(code):
            raise SandboxError(f"{self.name}: something outside it has killed it (a daemon's restart, the kernel, ...)")
        return Result(128 - code if code < 0 else code, False, output)

    def _watch(self, ended, reason, clock, deadline):
        """Until a command has ended: kill all at a limit, whose name goes into `reason`."""
        pause_s = 2
        while not ended.wait(max(0.01, min(pause_s, deadline - clock()))):
            begin = time.monotonic()
            if limit := "time" if clock() >= deadline else self._exceeded():
                reason.append(limit)
                while not ended.is_set():
                    try: return self.kill()
                    except SandboxError: ended.wait(1)   # a daemon that restarts: then the exec fails by itself
            pause_s = max(2, 20 * (time.monotonic() - begin))

    def _exceeded(self):
        """The limit that is passed, looked at from outside: host (its disk is full), disk or None."""
        if self._host_mb() < DISK_RESERVE_MB: return "host"
        if self._used_bytes() > self.disk_mb << 20: return "disk"

    def _used_bytes(self):
        return sum(max(4096, status.st_blocks * 512)   # empty ones fill the disk, too
                   for host in self.mounts.values() for _, status in _below(host))

    def _host_mb(self):
        usage = os.statvfs(self.place)
        return usage.f_bavail * usage.f_frsize >> 20

    def changed(self):
        """Files outside the workspace that were made, changed or (Docker) deleted since the start, but for SCRATCH: the
        first GET_FILES of them."""
        apart = tuple(f"{p}/" for p in (*SCRATCH, self.workdir))
        found = (path for inside, host in self.mounts.items() for file, status in _below(host)
                 if status.st_ctime > self.started_s and not stat.S_ISDIR(status.st_mode)
                 and not (path := os.path.join(inside, os.path.relpath(file, host))).startswith(apart))
        return sorted(itertools.islice(found, GET_FILES))

    def squash(self):
        """Leave one commit of the history of each repository in the workspace: no remote, tag, stash, reflog or object
        that it does not reach. Returns their number."""
        result = self.exec(["sh", "-c", workspace.SQUASH, self.workdir], timeout_s=600, user="root")
        if result.exit_code:
            raise SandboxError(f"{self.name}: git history could not be squashed; --off git leaves it as it is")
        return len(result.output.splitlines())

    def put(self, host, inside):
        """Copy a file to the path `inside`, or a folder's contents into the folder `inside`."""
        self._put([(Path(host), inside)])

    def get(self, inside, host):
        """Copy a file to the path `host`, or a folder's contents into the folder `host`. Raises FileNotFoundError;
        ValueError for symbolic links, devices and more than GET_BYTES: they must not reach the host."""
        written, num_bytes = {}, 0      # tarfile looks a hard link's file up among all members
        with _faults(f"get from {self.name}"), self._get(inside) as archive, tarfile.open(fileobj=archive) as tar:
            for member in _members(tar, f"{inside} in {self.name}"):
                path = Path(host, *Path(member.name).parts[1:])   # the first is the name of `inside` itself
                linked = written.get(member.linkname) if member.islnk() else None       # its content once more
                is_file = member.isreg() or linked is not None
                num_bytes += linked.stat().st_size if linked else member.size
                if (not (is_file or member.isdir()) or ".." in path.parts[len(Path(host).parts):]
                        or len(os.fsencode(path)) > 4000 or num_bytes > GET_BYTES):
                    raise ValueError(f"{inside} in {self.name} is not copied to the host: {member.name[:200]} is a "
                                     f"link or device, too deep, or the end of more than {GET_BYTES >> 20} MB")
                if is_file:
                    if linked: shutil.copyfile(linked, path)
                    else: tar.makefile(member, path)
                    written[member.name] = path
                    path.chmod(0o644 | member.mode & 0o111)
                else:
                    path.mkdir(parents=True, exist_ok=True)

    def carry(self, inside, other, off=(), env=None):
        """Make a folder of another sandbox, fresh from the image, equal to this one's; nothing is unpacked on the host.
        Raises as `get` does, and for what workspace.py refuses; `off`: its defences that are not wanted; `env`: of what
        will run there. Returns the names that were left out and that are not the image's."""
        what = f"{inside} in {self.name}"
        kept, links, python, (own_bytes, own_files) = other._clear(inside, off, env)    # own: not counted
        with _faults(f"carry {inside} from {self.name}"), self._get(inside, GET_BYTES + own_bytes) as archive:
            tar = tarfile.open(fileobj=archive)
            if not posixpath.basename(inside) or not tar.next().isdir():
                raise ValueError(f"{what} is not carried over: it is no folder of its own")
            members, left_out = workspace.choose(
                _members(tar, what, GET_FILES + own_files), inside, kept, links, off, python)
            with tempfile.TemporaryFile() as chosen:
                with tarfile.open(fileobj=chosen, mode="w") as new:
                    for member in members:
                        new.addfile(member, tar.extractfile(member) if member.isreg() else None)
                chosen.seek(0)
                other._unpack(chosen, posixpath.dirname(inside))
        return left_out

    def _clear(self, inside, off, env):
        """Empty a folder but for what stays the image's -> what workspace.heard tells."""
        words = ["sh", "-c", workspace.CLEAR, inside, "" if "tools" in off else "tools", *workspace.kept_by(off)]
        result = self.exec(words, user="root", env=env)
        if result.exit_code or len(result.output) >= TAIL_BYTES:
            raise SandboxError(f"{inside} of {self.name} cannot be emptied: {result.output[-1000:]}")
        return workspace.heard(result.output)

    def _put(self, copies, folders=()):
        """Copies, and folders for any user."""
        with _faults(f"put into {self.name}"), tempfile.TemporaryFile() as archive:
            with tarfile.open(fileobj=archive, mode="w") as tar:
                for host, inside in copies:
                    if not host.exists(): raise FileNotFoundError(f"put into {self.name}: there is no {host}")
                    if host.is_file() and posixpath.basename(inside) != host.name and self._is_folder(inside):
                        inside = posixpath.join(inside, host.name)      # as COPY does
                    # a folder itself only when empty: it would change the mode of one that exists
                    paths = sorted(host.iterdir()) if host.is_dir() else []
                    for path in paths or [host.resolve()]:
                        tar.add(path, inside.strip("/") + (f"/{path.name}" if paths else ""), filter=_anonymous)
                for inside in folders:
                    folder = tarfile.TarInfo(inside.strip("/"))
                    folder.type, folder.mode = tarfile.DIRTYPE, 0o777
                    tar.addfile(folder)
            archive.seek(0)
            if copies or folders: self._unpack(archive, "/")


def _anonymous(member, mtime=None):
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
    if mtime is not None: member.mtime = mtime
    return member


def _drain(chunks, log):
    """Read output to its end; the log gets the first LOG_BYTES, the caller the last TAIL_BYTES."""
    tail, total = bytearray(), 0
    with open(log or os.devnull, "ab", buffering=0) as file:
        for chunk in chunks:
            if total < LOG_BYTES: file.write(chunk[:LOG_BYTES - total])
            total += len(chunk)
            tail += chunk
            del tail[:-TAIL_BYTES]
        if total > LOG_BYTES: file.write(b"\n[%d bytes more]\n" % (total - LOG_BYTES))
    return tail.decode(errors="replace")


def _spool(chunks, what, max_bytes):
    """A temporary file of the chunks; ValueError past max_bytes."""
    file = tempfile.TemporaryFile(buffering=0)   # its descriptor goes to tar
    for chunk in chunks:
        file.write(chunk)
        if file.tell() > max_bytes:
            raise ValueError(f"{what} is not copied to the host: more than {max_bytes >> 20} MB")
    file.seek(0)
    return file


def _members(tar, what, max_files=None):
    """The members of an archive that came out of a sandbox; ValueError past GET_FILES: each costs a kilobyte here, and
    for what lies too deep to be unpacked."""
    for number, member in enumerate(tar):
        if len(os.fsencode(member.name)) > 4000: raise ValueError(f"{what} is not copied: it is too deep")
        if number >= (max_files or GET_FILES):
            raise ValueError(f"{what} is not copied: more than {max_files or GET_FILES} files and folders")
        yield member
    tar.fileobj.seek(tar.offset)   # tarfile takes anything for the end
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE): raise SandboxError(f"{what} came incomplete")


@contextlib.contextmanager
def _faults(what):
    """The daemon's and the system's many exceptions -> SandboxError; our own FileNotFoundError has no errno."""
    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError,
            subprocess.SubprocessError, tarfile.TarError, OSError) as error:
        if isinstance(error, FileNotFoundError) and error.errno is None: raise
        raise SandboxError(f"{what}: {error}") from error


# ---- Docker ----

@contextlib.contextmanager
def _locked(name):
    """One at a time for this name, in all threads and processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"harness-rl-locks-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / hashlib.sha256(name.encode()).hexdigest()[:16], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _say_once(text):
    print(text, file=sys.stderr, flush=True)


@functools.cache
def _client():
    return docker.from_env(timeout=300, max_pool_size=256)


def _remove_container(name):
    """Idempotent: a container that is gone, or that another thread removes, is fine."""
    try:
        _client().api.remove_container(name, force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409): raise


class Docker(Sandbox):
    container = None   # its name

    @staticmethod
    def problem():
        try:
            docker.from_env(timeout=10).ping()
        except (docker.errors.DockerException, requests.RequestException) as error:
            return (f"the docker daemon does not answer ({type(error).__name__}): start it (dockerd), or check "
                    "DOCKER_HOST and your rights")

    def _start(self):
        for _ in range(60):   # else an outage of a second would cost all rollouts that wait for their turn
            if not self.problem(): break    # by a client of its own: a daemon that ends answers old connections
            time.sleep(0.5)
        found, self.relay = image(self.env), None
        if _is_remote():
            mounts = [(inside, _volume(folder, found["Id"]), "volume") for folder, inside in self.runtimes.items()]
        else:
            binds = [*self.runtimes.items(), *([(self.socket, SOCKET)] if self.socket else [])]
            mounts = [(inside, str(Path(host).resolve()), "bind") for host, inside in binds]
        self.workdir = posixpath.normpath(self.env.workdir or found["Config"]["WorkingDir"] or "/")
        self.container = f"harness-rl-{_safe(self.run_id)}-{_safe(self.name)[-80:]}-{uuid.uuid4().hex[:8]}"
        labels = {"harness_rl.run": _safe(self.run_id), "harness_rl.owner": _owner(os.getpid())}
        made = _client().containers.create(
            found["Id"], name=self.container, hostname="sandbox", working_dir=self.workdir, environment=self.env.env,
            labels=labels,
            # A shell as process 1: it reaps orphans, ignores TERM and, unlike tini, outlives `kill -9 -1`.
            entrypoint=["/bin/sh", "-c", "trap '' HUP INT QUIT TERM; while :; do sleep 86400 & wait $!; done"],
            # What root needs for ordinary work on files of any owner, and to start or end services as another user
            # (su, pkill). Left out: device nodes, raw sockets, chroot, file capabilities, audit.
            cap_drop=["ALL"], cap_add=["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges"], log_config={"type": "none"},
            stop_signal="KILL",   # else a daemon that ends, or starts after a crash, waits 10 s for each
            **({"network": _bridge(self.run_id, labels)} if self.env.internet else {"network_mode": "none"}),
            mounts=[docker.types.Mount(*mount, read_only=True) for mount in mounts],
            ulimits=[docker.types.Ulimit(name=name, soft=most, hard=most)
                     for name, most in (("nofile", OPEN_FILES), ("core", 0), ("fsize", self.disk_mb << 20))],
            mem_limit=f"{self.memory_mb}m", memswap_limit=f"{self.memory_mb}m", nano_cpus=int(self.cpus * 1e9),
            pids_limit=self.pids, command=[])
        _client().api.start(self.container)
        upper = ((made.attrs.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir", "")
        if os.path.isdir(upper): self.mounts, self.place = {"/": Path(upper)}, Path(upper).parents[1]
        else:
            _say_once("warning: the files of Docker's containers cannot be looked at (that takes root on the daemon's "
                      "machine, and overlay2): there is no record of tampering")

    def _used_bytes(self):
        if self.mounts: return super()._used_bytes()
        with contextlib.suppress(SandboxError), _faults("look"):   # what has failed shows elsewhere
            rows = _client().api.containers(all=True, size=True, filters={"name": f"^/{self.container}$"})
            return sum(row.get("SizeRw", 0) for row in rows)
        return 0

    def _run(self, argv, env, cwd, user=""):
        api = _client().api
        argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv]   # one stream: else stdout and stderr change places
        create = functools.partial(api.exec_create, self.container, argv, environment=env, workdir=cwd,
                                   user=user)
        try:
            exec_id = create()["Id"]
        except docker.errors.APIError as error:
            if error.status_code != 409: raise
            self.kill()   # an agent can end process 1 (out of processes, then `kill -9 -1`): start again
            exec_id = create()["Id"]
        if self.socket and _is_remote() and not (self.relay and self.relay.is_alive()): self._connect()
        # not exec_start, which drops output that arrives together with the answer's head
        response = api.post(f"{api.base_url}/v{api.api_version}/exec/{exec_id}/start",
                            json={"Detach": False, "Tty": False}, stream=True, timeout=None)
        response.raise_for_status()

        def chunks():   # frames: stream number (4 bytes), length (4 bytes), data
            with response:
                while head := response.raw.read(8): yield response.raw.read(int.from_bytes(head[4:], "big"))
        return chunks(), lambda: api.exec_inspect(exec_id)["ExitCode"]

    def _connect(self):
        """To a sandbox on another machine: its end of the socket, carried over an exec's standard input and output."""
        api = _client().api
        exec_id = api.exec_create(self.container, RELAY, stdin=True, stderr=False, user="0", workdir="/")["Id"]
        pipe = api.exec_start(exec_id, socket=True)   # keeps its response alive
        wire = getattr(pipe, "_sock", pipe)

        def connect():
            (model := socket.socket(socket.AF_UNIX)).connect(str(self.socket))
            return model

        def carry():
            frames.run()
            pipe.close()
        frames = relay.over_exec(wire, connect)
        frames.send(0)
        if (answer := frames.read(8, 60)) != bytes(8):
            raise SandboxError(f"{self.name}: relay.py does not start ({answer}); it needs the runtimes python and "
                               "code, which all harnesses have")
        self.relay = threading.Thread(target=carry, daemon=True)
        self.relay.start()

    def kill(self):
        """End every process, keep the files. A restart, since a second exec would fail at the process limit."""
        self.relay, self.is_killed = None, True
        with _faults(f"kill {self.name}"): _client().api.restart(self.container, timeout=0)

    def _has_ended(self, code):
        """Also of the agent's doing? Not with this exit code: what process 1 makes of all that can be sent to it from
        inside is another one."""
        time.sleep(0.5)   # the daemon hears of the command's end first
        with _faults(f"look at {self.name}"): state = _client().api.inspect_container(self.container)["State"]
        return not state["Running"] and state["ExitCode"] == 137 and not state["OOMKilled"]

    def freeze(self):
        """End every process for good: files can be read, nothing runs any more."""
        with _faults(f"freeze {self.name}"):
            try: _client().api.kill(self.container)
            except docker.errors.APIError as error:
                if error.status_code != 409: raise   # 409: it does not run

    @contextlib.contextmanager
    def snapshot(self, is_last=False):
        """An Environment whose sandboxes start from the files as they are now; removed at the end of the block.
        is_last: this sandbox is frozen, and one other starts; bubblewrap then hands the files over and copies none."""
        with _faults(f"snapshot of {self.name}"):   # the image has the container's labels
            made = _client().api.commit(self.container, "harness-rl/snapshot", uuid.uuid4().hex)["Id"]
        try:
            yield dataclasses.replace(self.env, base=made, dockerfile=None, copies=[], folders=())
        finally:
            with contextlib.suppress(SandboxError), _faults("remove it"):   # `reap` does
                _client().api.remove_image(made, force=True)

    def stop(self):
        """Remove the container with all that it holds; may be called twice, and from another thread than exec."""
        if self.container:
            with _faults(f"stop {self.name}"): _remove_container(self.container)

    def _is_folder(self, inside): return self.exec(["test", "-d", inside], user="root").exit_code == 0

    def _unpack(self, archive, parent):
        _client().api.put_archive(self.container, parent, archive)

    def _get(self, inside, max_bytes=None):
        try:
            chunks, _ = _client().api.get_archive(self.container, inside)
        except docker.errors.APIError as error:
            if not (isinstance(error, docker.errors.NotFound) or IN_THE_WAY.search(str(error))): raise
            _client().api.inspect_container(self.container)   # where all of it is gone, that is a fault of ours
            raise FileNotFoundError(f"{inside} is not there in {self.name}") from error
        return _spool(chunks, f"{inside} in {self.name}", max_bytes or GET_BYTES)


RELAY = [*harnesses.PYTHON, f"{harnesses.PATHS['code']}/relay.py", SOCKET]


def _is_remote():
    """Does the daemon see other files than we do? It does when it is not reached by a unix socket."""
    return not _client().api.base_url.startswith("http+docker://local")


def _volume_name(folder):
    """Names, sizes and times of a folder's files make it; Python's caches come and go."""
    seen = [(str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path in sorted(Path(folder).rglob("*"))
            if path.suffix != ".pyc" and not path.is_dir() and (stat := path.lstat())]
    return f"harness-rl-{_safe(Path(folder).name)}-{hashlib.sha256(repr(seen).encode()).hexdigest()[:16]}"


def _volume(folder, image_id, known={}):
    """The name of a volume on the daemon's machine that holds a folder's content, filled once (by a container of any
    image, which never runs)."""
    with contextlib.suppress(KeyError, docker.errors.NotFound):     # another run's `reap` may have found it unused
        return _client().api.inspect_volume(known[folder])["Name"]
    name, owner = _volume_name(folder), _owner(os.getpid())
    labels = {"harness_rl.folder": str(folder), "harness_rl.maker": owner.partition(".")[0]}
    with _locked(name):
        filler = _client().containers.create(
            image_id, ["true"], mounts=[docker.types.Mount("/fill", name, "volume", labels=labels)],
            network_mode="none", labels={"harness_rl.run": "volume", "harness_rl.owner": owner})
        try:
            try: _client().api.get_archive(filler.id, "/fill/.whole")
            except docker.errors.NotFound:
                with tempfile.TemporaryFile() as archive:
                    with tarfile.open(fileobj=archive, mode="w") as tar:
                        tar.add(folder, ".", filter=_anonymous)
                        tar.addfile(_anonymous(tarfile.TarInfo(".whole")))   # last: without it, it is filled again
                    archive.seek(0)
                    _client().api.put_archive(filler.id, "/fill", archive)
        finally: _remove_container(filler.id)
    known[folder] = name
    return name


def _bridge(run_id, labels):
    """The name of the run's own network: to the outside, not to each other."""
    name = f"harness-rl-{_safe(run_id)}"
    with _locked(name):
        if not _client().api.networks(names=[f"^{name}$"]):
            apart = {"com.docker.network.bridge.enable_icc": "false"}
            _client().api.create_network(name, "bridge", apart, labels=labels)
    return name


def image(env):
    """The image to start from (what `docker image inspect` says): local, else built or pulled, once."""
    name, context = _context(env) if env.dockerfile else (env.base, None)
    with _locked(name):
        with contextlib.suppress(docker.errors.ImageNotFound): return _client().api.inspect_image(name)
        begin = time.monotonic()
        print(f"task {env.task}: {'building' if context else 'pulling'} image {name[:40]}", file=sys.stderr, flush=True)
        try:
            if context:
                _client().images.build(fileobj=context, custom_context=True, dockerfile=".harness-rl", tag=name,
                                       rm=True, forcerm=True, timeout=env.build_timeout_s)
            else:
                _client().images.pull(name)
        except docker.errors.BuildError as error:
            last = "".join(step.get("stream", "") for step in error.build_log)[-2000:]
            raise SandboxError(f"task {env.task}: image build failed: {error.msg} (for an image that cannot be pulled: "
                               f"--base_image NAME=LOCAL)\n{last}") from error
        except docker.errors.APIError as error:
            if context:
                raise SandboxError(f"task {env.task}: image build failed: {error.explanation} (the daemon's own "
                                   "builder knows no here-documents, --mount or --chmod; docker_image can name one "
                                   "that is built by hand)") from error
            raise SandboxError(
                f"task {env.task}: image {env.base} is not here and cannot be pulled; name a local image instead "
                f"(--base_image {env.base}=harness-rl/base, made by: bash tasks/base_image.sh): {error.explanation}"
            ) from error
        print(f"task {env.task}: image ready in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        return _client().api.inspect_image(name)


def _context(env):
    """(tag, build context): FROM names the stand-ins, the tag hashes all names, modes and contents."""
    context, ignore = tempfile.TemporaryFile(), env.dockerfile / ".dockerignore"
    text = re.sub(r"(?im)^(\s*FROM\s+(?:--\S+\s+)*)(\S+)", lambda m: m[1] + env.base_images.get(m[2], m[2]),
                  (env.dockerfile / "Dockerfile").read_text()).encode()
    with tarfile.open(fileobj=context, mode="w") as tar:
        patterns = ignore.read_text().split("\n") if ignore.exists() else []
        for name in sorted(docker.utils.build.exclude_paths(str(env.dockerfile), patterns)):
            tar.add(env.dockerfile / name, name, recursive=False, filter=functools.partial(_anonymous, mtime=0))
        file = tarfile.TarInfo(".harness-rl")
        file.size = len(text)
        tar.addfile(file, io.BytesIO(text))
    context.seek(0)
    digest = hashlib.file_digest(context, "sha256")
    for name in sorted({*env.base_images.values()}):       # a stand-in that was made anew is another image
        with contextlib.suppress(docker.errors.ImageNotFound):
            if re.search(rf"(?m)\s{re.escape(name)}(\s|$)", text.decode()):
                digest.update(_client().api.inspect_image(name)["Id"].encode())
    context.seek(0)
    return f"harness-rl/task:{digest.hexdigest()}", context


# ---- bubblewrap ----

WRITABLE = ("/tmp", "/var/tmp", "/root", "/home", "/logs", "/tests", "/solution")
TOO_DEEP = types.SimpleNamespace(st_blocks=1 << 50, st_ctime=0, st_mode=stat.S_IFDIR)
DEFAULTS = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
FIXED = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/run", "/sys")
ETC = ("alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf", "localtime", "os-release", "services")


def _below(folder):
    """(path, stat) of all below a folder; what vanishes meanwhile is left out. What lies too deep to be looked at
    counts as endless: an agent could hide gigabytes there."""
    folders = [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False): folders.append(entry.path)
                    yield entry.path, entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno == errno.ENAMETOOLONG: yield entry.path, TOO_DEEP


def _remove_folder(folder):
    if os.geteuid():   # the processes inside may have taken our right to enter their folders
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)
    for _ in range(40):   # what runs inside may still write for the moment that it takes to die
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)   # shutil.rmtree fails below 1000 folders
        if not os.path.lexists(folder): break
        time.sleep(0.05)


def _make_folder(run_id):
    return Path(tempfile.mkdtemp(prefix=f"harness-rl_{_safe(run_id)}_{_owner(os.getpid())}_"))


def _folders(copies):
    return [inside if host.is_dir() else posixpath.dirname(inside) for host, inside in copies]


def _end_all(is_it):
    for _ in range(100):   # it may have made a child since the look
        is_clear = True
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if is_it(process):
                    is_clear = False
                    os.kill(int(process.name), signal.SIGKILL)
        if is_clear: return
        time.sleep(0.01)


def _end_bwrap(folder):
    """Of a run that was killed while its bwrap started, which then had not yet asked to die with it."""
    is_bwrap = lambda words: words.partition(b"\0")[0].endswith(b"bwrap") and bytes(folder) in words
    _end_all(lambda process: is_bwrap((process / "cmdline").read_bytes()))


def _end_engine(folder):
    """vLLM's processes of a run that was killed while they started (proxy.WeightReceiver.end_with)."""
    mark = b"VLLM_RPC_BASE_PATH=" + bytes(folder) + b"\0"
    _end_all(lambda process: mark in (process / "environ").read_bytes())


class Bubblewrap(Sandbox):
    """The writable folders live in one temporary folder on the host and are mounted anew by each exec. As root on the
    host, bwrap mounts and then becomes a user id of this sandbox alone (so that the process limit counts, and
    nothing that root owns is writable); an ordinary user stays what they are, in a user namespace."""
    folder = None

    @staticmethod
    def problem():
        try:
            with Bubblewrap(Environment("host"), run_id="probe", name="probe") as box:
                result = box.exec(["true"])
        except SandboxError as error:
            return f"bubblewrap does not run: {error}"
        if result.exit_code:
            return f"bubblewrap does not run ({result.output.strip()}): allow user namespaces, or run as root"

    def _start(self):
        base, other = self.env.base, self.env.heir_of
        self.root = Path(base if os.path.isabs(base) else "/")
        self.workdir = posixpath.normpath(self.env.workdir or "/root")
        self.running, self.lock, self.bwrap = [], threading.Lock(), shutil.which("bwrap")
        if other:
            with other.lock: self.folder, other.folder = other.folder, None
            if not self.folder: raise SandboxError(f"{other.name} is stopped")
            self.uid, self.mounts = other.uid, dict(other.mounts)
            return
        self._refuse(f"task {self.env.task}:", base)
        self.folder = _make_folder(self.run_id)
        # as root: a user id that is unique while the folder lives
        self.uid = os.geteuid() or (1 << 30) + self.folder.stat().st_ino % (1 << 30)
        self._mount([*WRITABLE, self.workdir, *_folders(self._placed())])
        for name, text in {"passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{self.uid}:{self.uid}::/root:/bin/bash\n",
                           "group": f"root:x:0:\nagent:x:{self.uid}:\n", "hosts": "127.0.0.1 localhost sandbox\n",
                           "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}.items():
            path = self.folder / "etc" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o644)
        if self.workdir not in self.mounts:   # it lies in one of them
            for _ in self._run(["mkdir", "-p", self.workdir], {}, "/")[0]: pass

    def _refuse(self, task, base):
        """SandboxError where only Docker will do, or where bubblewrap is not there."""
        if self.env.internet:
            raise SandboxError(f"{task} bubblewrap has no network of its own to give; use --sandbox docker")
        if self.env.dockerfile:
            raise SandboxError(f"{task} bubblewrap builds no image, and its Dockerfile needs one "
                               f"({self.env.build_line}); use --sandbox docker")
        if not os.path.isabs(base) and base.partition(":")[0] not in ("host", "debian", "ubuntu", "harness-rl/base"):
            raise SandboxError(f"{task} bubblewrap has no image {base}; name a root folder or this machine's own /usr "
                               f"(--base_image {base}=FOLDER or {base}=host), or use --sandbox docker")
        if not self.bwrap: raise SandboxError("bwrap is missing: apt-get install bubblewrap")

    def _mount(self, folders):
        """Give each folder one on the host that outlives an exec, unless a folder above has it already."""
        for inside in sorted(folders):
            if any(f"{inside}/".startswith(f"{m}/") for m in self.mounts): continue
            # a mount point inside a writable folder could be moved away between two execs
            taken = [f"{path}/" for path in (*FIXED, *self.runtimes.values(), *self.mounts)]
            if inside == "/" or any(f"{inside}/".startswith(t) or t.startswith(f"{inside}/") for t in taken):
                raise SandboxError(f"task {self.env.task}: bubblewrap cannot make {inside} writable; "
                                   "use --sandbox docker")
            self.mounts[inside] = self.folder / str(len(self.mounts))
            self.mounts[inside].mkdir()
            os.chown(self.mounts[inside], self.uid, -1)

    def _bwrap(self, cwd, env):
        """The command line in front of a command; its environment is set last: an LD_PRELOAD must not reach bwrap."""
        binds = [("--ro-bind", host, inside) for host, inside in self.runtimes.items()]
        binds += [("--ro-bind", self.socket, SOCKET)] if self.socket else []
        binds += [("--bind", host, inside) for inside, host in self.mounts.items()]
        binds += [("--ro-bind", path, f"/etc/{path.name}") for path in (self.folder / "etc").iterdir()]
        binds += [("--ro-bind", path, f"/etc/{name}") for name in ETC if (path := self.root / "etc" / name).exists()]
        words = [self.bwrap, "--die-with-parent", "--new-session", "--hostname", "sandbox", "--unshare-ipc",
                 "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
        words += ["--unshare-user"] if os.geteuid() else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        words += ["--ro-bind", self.root / "usr", "/usr"]
        for path in self.root.iterdir():
            if re.fullmatch(r"bin|sbin|lib\w*", path.name):
                source = ("--symlink", os.readlink(path)) if path.is_symlink() else ("--ro-bind", path)
                words += [*source, f"/{path.name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--size", 64 << 20, "--perms", "1777", "--tmpfs", "/dev/shm"]
        for parent in sorted({p for _, _, inside in binds for p in list(Path(inside).parents)[:-1]}):
            words += ["--perms", "0755", "--dir", parent]
        words += [word for bind in binds for word in bind] + ["--chdir", cwd, "--remount-ro", "/"]
        if not os.geteuid():
            words += ["/usr/bin/setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        # data, not address space: node and the like reserve far more than they use
        files = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        words += ["/usr/bin/prlimit", f"--data={self.memory_mb << 20}", f"--nproc={self.pids}",
                  f"--fsize={self.disk_mb << 20}", f"--nofile={files}", "--core=0", "--",
                  "/usr/bin/env", "-i", *(f"{k}={v}" for k, v in env.items())]
        return [str(word) for word in words]

    def _run(self, argv, env, cwd, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, user=""):
        with self.lock:   # nothing starts once stop() has run
            if not self.folder: raise SandboxError(f"{self.name} is stopped")
            # None: a command of ours, which the task's PATH must not lead to one that the agent has put there
            env = DEFAULTS if env is None else DEFAULTS | self.env.env | env
            process = subprocess.Popen(self._bwrap(cwd, env) + argv, env={}, stdin=stdin,
                                       stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
            self.running = [p for p in self.running if p.poll() is None] + [process]

        def chunks():
            with process.stdout as pipe:
                (wait := select.poll()).register(pipe)
                while process.poll() is None or wait.poll(200):
                    if wait.poll(200):
                        if not (chunk := os.read(pipe.fileno(), 1 << 16)): return
                        yield chunk
                # bwrap was killed while it set up: its child, which holds the pipe, would wait for it for ever
                with contextlib.suppress(ProcessLookupError): os.killpg(process.pid, signal.SIGKILL)
        return chunks(), process.poll

    def kill(self):
        """End every process, keep the files: with bwrap's child its pid namespace ends. Not bwrap alone: killed while
        it starts it would leave a child that waits for ever, or runs the command."""
        children, deadline, self.is_killed = [], time.monotonic() + 10, True
        for process in self.running:
            pid = process.pid
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    os.kill(pid, signal.SIGSTOP)   # it makes no more children
                    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                        os.kill(int(child), signal.SIGKILL)
                        children.append(child)
                process.kill()
        while any(map(_start_ticks, children)) and time.monotonic() < deadline:   # dead once all in its namespace are
            time.sleep(0.002)

    def _has_ended(self, code):
        return code == -9   # bwrap itself: of a command that it ran it tells 137

    freeze = kill   # what was started ends with its exec

    @contextlib.contextmanager
    def snapshot(self, is_last=False):
        """As Docker's."""
        if is_last:
            yield dataclasses.replace(self.env, copies=[], folders=(), heir_of=self)
            return
        folder = _make_folder(self.run_id)
        try:
            with _faults(f"snapshot of {self.name}"):
                subprocess.run(["cp", "-a", "--reflink=auto", *self.mounts.values(), folder], check=True)
            copies = [(folder / host.name, inside) for inside, host in self.mounts.items()]
            yield dataclasses.replace(self.env, copies=copies, folders=(), heir_of=None)
        finally:
            _remove_folder(folder)

    def stop(self):
        """Remove the folder with all that it holds; may be called twice, and from another thread than exec."""
        if self.folder:
            with self.lock: folder, self.folder = self.folder, None
            if not folder: return                           # another thread has
            self.kill()
            for process in self.running: process.wait()
            _remove_folder(folder)

    def _is_folder(self, inside): return inside in self.mounts      # of others none can be written to

    def _put(self, copies, folders=()):
        self._mount(_folders(copies))
        for parent, name in map(posixpath.split, folders):
            path = self.mounts[parent] / name
            path.mkdir()
            path.chmod(0o777)
            os.chown(path, self.uid, -1)
        super()._put(copies)

    def _tar(self, inside, words, max_bytes=None, **pipes):
        """(exit code, output) of tar, run inside as the user there: a link made there leads nowhere on the host."""
        chunks, poll = self._run(["tar", *words], None, "/", **pipes)
        output = _spool(chunks, f"{inside} in {self.name}", max_bytes or GET_BYTES)
        while (code := poll()) is None: time.sleep(0.001)
        return code, output

    def _unpack(self, archive, parent):
        code, output = self._tar(parent, ["-xp", "--no-overwrite-dir", "-C", parent], stdin=archive)
        if code: raise SandboxError(f"put into {self.name}: {output.read(1000).decode(errors='replace')}")

    def _get(self, inside, max_bytes=None):
        parent, name = posixpath.split(inside.rstrip("/"))
        code, archive = self._tar(inside, ["-c", "-C", parent, "--", name], max_bytes, stderr=subprocess.DEVNULL)
        if code not in (0, 1, 2): raise SandboxError(f"get {inside} from {self.name}: tar was killed ({code})")
        if not archive.read(tarfile.BLOCKSIZE).strip(b"\0"):
            if code == 1: raise SandboxError(f"get {inside} from {self.name}: bwrap failed")    # of tar it is 2
            raise FileNotFoundError(f"{inside} is not there in {self.name}")
        if code > 1:   # 1: a file changed while it was read
            raise ValueError(f"{inside} in {self.name} is not copied to the host: parts of it cannot be read")
        archive.seek(0)
        return archive


SANDBOXES = {"docker": Docker, "bubblewrap": Bubblewrap}

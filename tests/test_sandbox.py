"""Sandboxes, for real: tests of both kinds start containers or bwrap. `pytest tests/test_sandbox.py`, about a minute.

Needs the image harness-rl/base (bash tasks/base_image.sh). A kind that does not run here is skipped, in CI it fails."""
import contextlib
import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

import sandbox
import workspace
from conftest import until
from sandbox import SANDBOXES, Environment, SandboxError, choose, environment, reap

REPO = Path(sandbox.__file__).parent
BASE = {"debian:bookworm-slim": "harness-rl/base"}
PLAIN = Environment("harness-rl/base", workdir="/app")
RUN = f"test-{os.getpid()}"


def needs(kind):
    problem = SANDBOXES[kind].problem()
    if problem and not os.environ.get("CI"):
        pytest.skip(problem)
    assert not problem, problem
    return kind


@pytest.fixture(scope="module", params=["docker", "bubblewrap"])
def kind(request):
    yield needs(request.param)
    reap(RUN)


@pytest.fixture(scope="module")
def box(kind):
    """One sandbox for the tests that leave no trace in it."""
    with SANDBOXES[kind](PLAIN, run_id=RUN, name="shared", memory_mb=1024, pids=64) as box:
        yield box


@pytest.fixture(scope="module")
def other(kind):
    """One more, for tests that fill its workspace anew."""
    with make(kind) as box:
        yield box


def make(kind, env=PLAIN, **options):
    return SANDBOXES[kind](env, run_id=RUN, name="test", **options)


def sh(box, script, **options):
    return box.exec(["sh", "-c", script], **options)


def task(folder, dockerfile, **files):
    """A task folder whose environment holds a Dockerfile and files (keys: names, __ for a dot)."""
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (folder / "environment" / name.replace("__", ".")).write_text(text)
    return folder


def remains():
    """Containers and folders of this test run."""
    folders = [p.name for p in Path(tempfile.gettempdir()).glob(f"harness-rl_{RUN}_*")]
    if SANDBOXES["docker"].problem():
        return folders
    found = docker.from_env().containers.list(all=True, filters={"label": f"harness_rl.run={RUN}"})
    return folders + [c.name for c in found]


# ---- exec ----

def test_exec(box):
    """Catches: an exit code or stderr that is lost, env or cwd not passed on, the host's environment leaking in."""
    os.environ["LEAK"] = "secret"
    result = sh(box, "pwd; echo $A; echo err >&2; env; exit 7", env={"A": "x y"}, cwd="/tmp")
    assert (result.exit_code, result.timed_out) == (7, False)
    assert result.output.startswith("/tmp\nx y\nerr\n") and "secret" not in result.output
    assert box.exec(["pwd"]).output == "/app\n" and box.exec(["no-such-program"]).exit_code == 127
    assert sh(box, "kill -TERM $$").exit_code == 143


def test_timeout_kills_the_tree(kind):
    """Catches: a kill that reaches the client or the first process only, loses files, or leaves no exec possible."""
    with make(kind) as box:
        start = time.time()
        result = sh(box, "echo kept > f; echo begin; setsid sh -c 'sleep 8; echo late > f' & trap '' TERM; sleep 600",
                    timeout_s=5)
        assert (result.exit_code, result.timed_out, result.output) == (137, True, "begin\n")
        assert time.time() - start < 300
        time.sleep(4)
        # Docker: process 1 has a sleep of its own
        assert sh(box, "cat f; cat /proc/[0-9]*/comm | grep -c sleep").output in ("kept\n0\n", "kept\n1\n")


def test_timeout_of_a_silent_process(box):
    """Catches: a process that closes its output taken for one that has ended, so that no time limit holds it."""
    assert sh(box, "exec >&- 2>&-; sleep 0.5; exit 5").exit_code == 5
    assert sh(box, "exec >&- 2>&-; sleep 60", timeout_s=0.5).timed_out


def test_output_is_bounded(box, tmp_path):
    """Catches: endless output held in memory or written to the disk; a tail that is not the last part."""
    log, peak = tmp_path / "log", []
    before = rss_mb()
    watch = threading.Timer(1, lambda: peak.append(rss_mb()))
    watch.start()
    result = sh(box, "head -c 300000000 /dev/zero; echo end", log=log)
    watch.join()
    assert result.exit_code == 0 and result.output.endswith("\0end\n") and len(result.output) == sandbox.TAIL_BYTES
    assert sandbox.LOG_BYTES < log.stat().st_size < sandbox.LOG_BYTES + 100 and max(peak + [rss_mb()]) - before < 100


def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def test_process_limit(kind):
    """Catches: a fork bomb that takes the machine, or that cannot be killed since killing needs a process."""
    with make(kind, pids=40) as box:
        result = box.exec(["bash", "-c", "f() { f | f & }; f; sleep 30"], timeout_s=2)
        assert result.timed_out and ("fork" in result.output or not result.output)
        assert sh(box, "for i in $(seq 60); do sleep 3 & done; wait", timeout_s=20).exit_code != 0
        box.kill()
        assert sh(box, "echo alive").output == "alive\n"


def test_memory_limit(kind):
    """Catches: limits that are not set."""
    with make(kind, memory_mb=200) as box:
        result = box.exec(["perl", "-e", "print length('x' x shift)", "100000000"], timeout_s=20)
        assert result.output == "100000000"
        result = box.exec(["perl", "-e", "print length('x' x shift)", "900000000"], timeout_s=20)
        assert result.exit_code and "900000000" not in result.output


def test_process_one_survives(kind):
    """Catches: an agent that ends its own container and passes for a fault of ours."""
    with make(kind) as box:
        sh(box, "echo kept > f; kill 1; kill -9 1; kill -9 -1", timeout_s=10)
        assert sh(box, "cat f").output == "kept\n"


# ---- isolation ----

def test_no_network(box):
    """Catches: any way out but the model socket: an interface, an address, a port of the host, a name."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        script = ("cut -d: -f1 /proc/net/dev | tail -n +3; cat /proc/net/route | tail -n +2; "
                  f"for a in 127.0.0.1/{port} 172.17.0.1/{port} 1.1.1.1/53; do "
                  "(echo > /dev/tcp/$a) 2> /dev/null && echo open $a; done; "
                  "getent hosts debian.org; ls /run/docker.sock /var/run/docker.sock 2> /dev/null")
        assert box.exec(["bash", "-c", script], timeout_s=20).output.split() == ["lo"]


def test_host_is_invisible(box, tmp_path):
    """Catches: host files, processes or devices that show inside; privileges; a writable root of the host."""
    for path in (REPO, tmp_path, f"/proc/{os.getpid()}/root/etc"):
        assert sh(box, f"ls {path}").exit_code != 0, path
    shadow = Path("/etc/shadow").read_text() if os.geteuid() == 0 else "no reading"
    assert sh(box, "cat /etc/shadow").output != shadow
    status = dict(line.split(":\t") for line in sh(box, "cat /proc/self/status").output.splitlines())
    assert status["NoNewPrivs"] == "1" and int(status["CapEff"], 16) & ~0b11101011 == 0   # the six of Docker.start
    assert sh(box, "echo x > /proc/sys/kernel/core_pattern").exit_code and sh(box, "mknod /tmp/d b 8 0").exit_code
    assert sh(box, "unshare -n true; mount -t tmpfs x /mnt").exit_code


def test_runtime_and_socket(kind, tmp_path):
    """Catches: a runtime that can be changed from inside (it is shared), a socket that its user may not connect to."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "runtime" / "tool").chmod(0o755)
    client = tmp_path / "runtime" / "client.pl"   # Perl is in every Debian base
    client.write_text('use IO::Socket::UNIX; my $s = IO::Socket::UNIX->new(Peer => "/run/model.sock") or die "no: $!"; '
                      'print $s "ping\\n"; $s->flush; print <$s>;')
    with tempfile.TemporaryDirectory(prefix="s") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/m.sock")
        server.listen()

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"pong " + connection.recv(100))
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with make(kind, runtimes={tmp_path / "runtime": "/opt/harness/tool"}, socket=f"{short}/m.sock") as box:
            assert box.exec(["/opt/harness/tool/tool"]).output == "tool\n"
            assert box.exec(["perl", "/opt/harness/tool/client.pl"], timeout_s=10).output == "pong ping\n"
            assert sh(box, "echo x >> /opt/harness/tool/tool").exit_code
            assert sh(box, "rm -rf /opt/harness/tool").exit_code
    assert "tool" in (tmp_path / "runtime" / "tool").read_text()


def test_a_daemon_on_another_machine(far_daemon, tmp_path):
    """Catches: mounts of paths that are not there, a network in the socket's place, connections that mix or lose bytes,
    a half-closed one that ends early, a socket that a kill takes for good, volumes that are filled again or stay."""
    code = f"""if 1:
        import hashlib, os, shutil, socket, sys, threading, time
        import harnesses, sandbox
        from pathlib import Path
        server = socket.socket(socket.AF_UNIX)
        server.bind("m.sock"), server.listen()
        def one(client):
            with client:
                data = b"".join(iter(lambda: client.recv(1 << 16), b""))
                client.sendall(hashlib.sha256(data).hexdigest().encode() + data[:1 << 20])
        def accept():
            while True: threading.Thread(target=one, args=server.accept()[:1], daemon=True).start()
        threading.Thread(target=accept, daemon=True).start()
        runtimes = harnesses.load("bash").mounts()
        shutil.copytree(harnesses.runtime("code"), "code", ignore=shutil.ignore_patterns("__pycache__"))
        runtimes = {{Path("code").absolute() if p.name == "harnesses" else p: inside for p, inside in runtimes.items()}}
        num_volumes = lambda: sum(v.attrs["Labels"]["harness_rl.folder"] in map(str, runtimes)      # others may be there
                                  for v in sandbox._client().volumes.list())
        client = '''if 1:
            import hashlib, os, socket, threading
            def one(number):
                data, right = os.urandom(number * 90_000), 0
                with socket.create_connection(("127.0.0.1", 8000)) as sock:
                    sock.sendall(data), sock.shutdown(socket.SHUT_WR)
                    answer = b"".join(iter(lambda: sock.recv(65536), b""))
                print("right" if answer == hashlib.sha256(data).hexdigest().encode() + data[:1 << 20] else "wrong")
            threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()'''
        python = [*harnesses.PYTHON, harnesses.PATHS["code"] + "/forward.py", *harnesses.PYTHON, "-c", client]
        for turn in range(2):
            started, before = time.monotonic(), threading.active_count()
            with sandbox.Docker(sandbox.Environment("harness-rl/base", workdir="/app"), run_id="{RUN}", name="far",
                                runtimes=runtimes, socket=Path("m.sock").absolute()) as box:
                print(box.exec(python, timeout_s=60).output.count("right"))
                box.kill()
                print(box.exec(python, timeout_s=60).output.count("right"))
                print(box.exec(["bash", "-c", "grep -o '[a-z]*:' /proc/net/dev; echo x > /opt/harness/code/x"]))
                print(box.exec(["sleep", "60"], timeout_s=0.5).timed_out, box.changed())
            while threading.active_count() > before and time.monotonic() < started + 100: time.sleep(0.1)
            print(threading.active_count() - before, num_volumes())
        Path("code/bash.py").write_text("changed")
        sandbox.reap(), print(num_volumes(), sandbox._client().containers.list(all=True))"""
    with tempfile.TemporaryDirectory(prefix="s") as short:
        result = subprocess.run([sys.executable, "-c", code], cwd=short, text=True, capture_output=True, timeout=600,
                                env=os.environ | far_daemon | {"PYTHONPATH": str(REPO)})
    lines = result.stdout.splitlines()
    assert result.stderr.count("no record of tampering") == 1 and len(lines) == 11, result
    for turn in (lines[:5], lines[5:10]):
        assert turn[0] == turn[1] == "16" and "='lo:\\n" in turn[2] and "Read-only file" in turn[2], result
        assert turn[3:] == ["True []", "0 2"], result
    assert lines[10] == "1 []"


# ---- copies ----

def test_put_and_get(kind, tmp_path):
    """Catches: content, modes or inner links lost on the way; a mode of an existing folder changed by `put`."""
    source = tmp_path / "in"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    os.link(source / "sub" / "run.sh", source / "sub" / "hard")
    (source / "data").write_bytes(bytes(range(256)) * 5000)
    source.chmod(0o700)
    with make(kind) as box:
        mode = sh(box, "stat -c %a /tmp").output
        box.put(source, "/tmp")
        box.put(source, "/app/new/place")
        box.put(source / "data", "/app/one")
        assert sh(box, "stat -c %a /tmp").output == mode
        assert sh(box, "new/place/link; cmp one /tmp/data; echo more > new/place/sub/empty/f; rm new/place/link"
                  ).output == "ran\n"
        box.get("/app/new/place", tmp_path / "out")
        box.get("/app/one", tmp_path / "one")
        assert all((tmp_path / name).read_bytes() == (source / "data").read_bytes() for name in ("one", "out/data"))
        assert all(os.access(tmp_path / "out" / "sub" / name, os.X_OK) for name in ("run.sh", "hard"))
        assert (tmp_path / "out" / "sub" / "hard").read_text() == (source / "sub" / "run.sh").read_text()
        assert (tmp_path / "out" / "sub" / "empty" / "f").read_text() == "more\n"
        with pytest.raises(FileNotFoundError, match="/app/missing"):
            box.get("/app/missing", tmp_path / "missing")
        with pytest.raises(FileNotFoundError, match="nothing"):
            box.put(tmp_path / "nothing", "/app/nothing")


@pytest.mark.parametrize("trick", ["ln -s /etc/passwd x/f", "ln -s ../../../etc x/f", "rmdir x; ln -s /etc x",
                                   "mkfifo x/f", "truncate -s 9G x/f"])
def test_get_refuses_tricks(box, tmp_path, trick, monkeypatch):
    """Catches: a link, device or enormous file made inside that reads or fills the host's disk."""
    monkeypatch.setattr(sandbox, "GET_BYTES", 20 << 20)
    assert sh(box, f"rm -rf x; mkdir x; {trick}").exit_code == 0
    with pytest.raises(ValueError, match="/app/x in shared is not copied"):
        box.get("/app/x", tmp_path / "out")
    assert not (tmp_path / "out" / "f").exists() and not (tmp_path / "out").is_symlink()


def test_the_number_of_files_is_bounded(kind, tmp_path, monkeypatch):
    """Catches: a million empty files, made inside, that fill the host's memory or its table of files."""
    monkeypatch.setattr(sandbox, "GET_FILES", 1000)
    with make(kind) as agent, make(kind) as fresh, make(kind) as another:
        sh(agent, "mkdir x; cd x; for i in $(seq 990); do echo > $i; done")
        agent.carry("/app", fresh)
        agent.get("/app/x", tmp_path / "few")
        sh(agent, "cd x; for i in $(seq 20); do echo > y$i; done")
        for out_of_there in (lambda: agent.carry("/app", another), lambda: agent.get("/app", tmp_path / "many")):
            with pytest.raises(ValueError, match=r"more than 100\d files"): out_of_there()
        sh(agent, "for i in $(seq 1100); do echo > /home/$i; done")
        assert 500 < len(agent.changed()) <= 1000


def test_carry(kind):
    """Catches: a workspace that reaches the verifier with files that the agent had deleted, or without its links."""
    with make(kind) as first, make(kind) as second:
        sh(second, "echo old > deleted; mkdir d")
        sh(first, "echo new > kept; ln -s /usr/bin/env env; ln kept hard; mkdir -p d/e; echo x > d/e/f")
        first.carry("/app", second)
        assert sh(second, "find . | sort; cat kept hard d/e/f; ./env echo runs").output.split() == \
            [".", "./d", "./d/e", "./d/e/f", "./env", "./hard", "./kept", "new", "new", "x", "runs"]
        sh(first, "ln -s /etc /tmp/link")
        with pytest.raises(ValueError, match="/tmp/link"):
            first.carry("/tmp/link", second)


@pytest.mark.parametrize("trick, says", [
    ("ln -s /etc/passwd f", "link out of the workspace"), ("ln -s ../tests/x f", "link out of"),
    ("ln -s d/../x f", "link out of"), ("ln -s / f", "link out of"), ("ln -s /usr/../tests f", "link out of"),
    ("ln -s /application f", "link out of"),
    ("mkfifo f", "device or fifo"), ("echo > f; chmod u+s f", "setuid"), ("echo > f; chmod g+s f", "setuid")])
def test_carry_refuses(box, other, trick, says):
    """Catches: what leads the verifier out of the workspace, hangs it or gives rights in it, carried over all the
    same."""
    sh(box, f"rm -rf /app/..?* /app/.[!.]* /app/*; cd /app; {trick}")
    with pytest.raises(ValueError, match=f"f is not carried over.*{says}"):
        box.carry("/app", other)
    box.carry("/app", other, off=("links",))
    assert sh(other, "ls -d f").output == "f\n"


def test_a_deep_workspace_takes_no_time():
    """Catches: nested folders, a moment's work for an agent, that cost the host hours to look through."""
    members = [tarfile.TarInfo("app" + "/d" * depth) for depth in range(3000)]
    for member in members: member.type = tarfile.DIRTYPE
    started = time.process_time()
    chosen, left_out = workspace.choose(members, "/app", {"d/e", ".git"}, {}, ())
    assert (len(chosen), left_out) == (3000, []) and time.process_time() - started < 5


def test_carry_keeps_the_image_s_tools(kind, tmp_path):
    """Catches: tools, history or start-up files of the agent's that the verifier would run, honest work that is lost
    with them, and a switch that does not switch."""
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nWORKDIR /app\n"
                  "ENV PATH=/app/tools/:./none:.:/usr/bin:/bin\n"
                  "ENV PYTHONPATH=/app/py:lib:./code\n"
                  "COPY f .\n")
    for name in ("tools/x", "v/pyvenv.cfg", "v/bin/x", "a/node_modules/x", "sub/conftest.py", ".git/config",
                 "src/main.py", "code.py", "lib/ast.py", ".profile"):
        path = folder / "environment" / "f" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("image")
    with make(kind, environment(folder, BASE)) as agent:
        sh(agent, """for f in tools/x v/bin/x v/bin/y a/node_modules/x sub/conftest.py .git/config src/main.py \
                code.py; do echo agent > $f; done
            rm -r a; ln -s src argparse; mkdir -p y/.git; ln -s ../../src y/.git/hooks
            for f in lib/ast.py lib/json.py py/json.py code/json.py libs/x .config/curlrc z/.git/commondir .profile \
                .bashrc .config/uv/x sub/.bashrc bare/config bare/hooks/x bare/HEAD bare/objects/x uv.toml \
                new/.git/config new/.git/hooks/post-checkout new/.git/HEAD x.git/config new/conftest.py \
                json/__init__.py json/data.py src/json.py pytest.py iniconfig.py sitecustomize.py none/y \
                src/__pycache__/main.cpython-311.pyc conftest.py.d/x e-1.dist-info/entry_points.txt pytest.ini \
                .local/lib/python3.11/site-packages/x.pth model.pth; do
                mkdir -p $(dirname $f); echo agent > $f; done; mkdir w; echo gitdir: ../x.git > w/.git""")
        agent.freeze()
        shown = "find . -type f | sort | while read f; do echo $f $(cat $f); done"
        with make(kind, environment(folder, BASE)) as fresh:
            left_out = agent.carry("/app", fresh, env={"LD_LIBRARY_PATH": "/app/libs"})
            assert sorted(x for x in left_out if not x.startswith(".local/lib")) == [
                ".bashrc", ".config/curlrc", ".config/uv", ".config/uv/x", "argparse", "bare/config", "bare/hooks",
                "bare/hooks/x", "code/json.py", "e-1.dist-info/entry_points.txt", "iniconfig.py", "json/__init__.py",
                "lib/json.py", "new/.git/config", "new/.git/hooks", "new/.git/hooks/post-checkout", "new/conftest.py",
                "py/json.py", "pytest.ini", "pytest.py", "sitecustomize.py", "uv.toml", "w/.git", "x.git/config",
                "y/.git/hooks", "z/.git/commondir"]
            assert sh(fresh, shown).output.split("\n")[:-1] == [
                "./.git/config image", "./.profile image", "./a/node_modules/x image", "./bare/HEAD agent",
                "./bare/objects/x agent", "./code.py agent", "./conftest.py.d/x agent", "./json/data.py agent",
                "./lib/ast.py agent", "./model.pth agent", "./new/.git/HEAD agent", "./src/json.py agent",
                "./src/main.py agent", "./sub/.bashrc agent", "./sub/conftest.py image", "./tools/x image",
                "./v/bin/x image", "./v/pyvenv.cfg image"]
        with make(kind, environment(folder, BASE)) as fresh:
            assert agent.carry("/app", fresh, off=("git", "tools")) == []
            assert "image" not in sh(fresh, shown + " | grep -v pyvenv").output
            assert "./v/bin/y agent" in sh(fresh, shown).output


@pytest.mark.parametrize("suffix", ["py", "txt"])
def test_an_image_of_many_files(kind, tmp_path, suffix):
    """Catches: a list of the image's files that is cut in a word, by which the next one is lost, a folder in which the
    agent's module would be loaded; and files that need no place in it, so that work on the image's own is lost."""
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nWORKDIR /app\nENV PYTHONPATH=/app/code\nCOPY f .\n")
    (folder / "environment/f").mkdir()
    for name in ("random.py", *(f"{'x' * 20}{i}.{suffix}" for i in range(600))):
        (folder / f"environment/f/{name}").touch()
    with make(kind, environment(folder, BASE)) as agent, make(kind, environment(folder, BASE)) as fresh:
        sh(agent, "mkdir code; echo agent | tee code/argparse.py > random.py")
        left_out = agent.carry("/app", fresh)
        assert "code/argparse.py" in left_out
        if suffix == "txt": assert len(left_out) == 1 and sh(fresh, "cat random.py").output == "agent\n"


def test_a_folder_above_what_stays_is_not_replaced():
    """Catches: a link in the place of a folder in which the image's tools stay, by which the verifier finds others."""
    link = tarfile.TarInfo("app/repo")
    link.type, link.linkname = tarfile.SYMTYPE, "r2"
    for member in (link, tarfile.TarInfo("app/repo")):
        with pytest.raises(ValueError, match="repo is not carried over: the image has a folder there"):
            workspace.choose([member], "/app", {"repo/.git"}, {}, ())


def test_second_names(kind):
    """Catches: a clone of the workspace into itself, whose objects are second names of the image's, that costs an
    honest agent its reward; a second name of a link, which leads elsewhere than the first; and a file that is there
    twice."""
    with make(kind) as agent, make(kind) as fresh:
        sh(agent, "mkdir -p .git/objects b c/.git/objects; echo x > .git/objects/1; ln .git/objects/1 c/.git/objects/1;"
                  "ln .git/objects/1 c/.git/objects/2; ln -s ../b b/l; ln -P b/l c/l; echo y > b/y; ln b/y c/y")
        sh(fresh, "mkdir -p .git/objects; echo image > .git/objects/1")
        agent.carry("/app", fresh)
        assert sh(fresh, "cat .git/objects/1 c/.git/objects/1 c/.git/objects/2 b/y c/y; readlink b/l c/l; "
                  "stat -c %h .git/objects/1 c/.git/objects/1 b/y").output.split() == \
            ["image", "x", "x", "y", "y", "../b", "../b", "1", "2", "2"]
        sh(agent, "ln -s ../tests b/t; ln -P b/t t")
        with pytest.raises(ValueError, match="t is not carried over: it is a link out of"): agent.carry("/app", fresh)


def test_what_the_image_holds_is_not_counted(kind, tmp_path, monkeypatch):
    """Catches: a task whose own workspace is over the limits, for which nobody is ever paid; and limits that are
    gone."""
    monkeypatch.setattr(sandbox, "GET_BYTES", 4 << 20), monkeypatch.setattr(sandbox, "GET_FILES", 500)
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY f .\n")
    (folder / "environment/f").mkdir()
    for i in range(600): (folder / f"environment/f/{i}").write_bytes(bytes(20_000))
    with make(kind, environment(folder, BASE)) as agent:
        for script, limit in (("mkdir x; head -c 3000000 /dev/zero > x/big", ""),
                              ("head -c 3000000 /dev/zero > x/b", "MB"),
                              ("rm x/b; for i in $(seq 600); do : > x/$i; done", "files")):
            sh(agent, script)
            with make(kind, environment(folder, BASE)) as fresh:
                with pytest.raises(ValueError, match=f"more than .*{limit}") if limit else contextlib.nullcontext():
                    agent.carry("/app", fresh)
                if not limit: assert sh(fresh, "ls | wc -l; stat -c %s x/big").output == "601\n3000000\n"


def test_squash(bubblewrap_box):
    """Catches: history, a remote with its password, a tag, stash, reflog or loose object that an agent can read; a
    working tree, index or HEAD that is no longer as it was."""
    box = bubblewrap_box
    script = """git init -q -b dev .; git config user.name n; git config user.email e@e; echo 1 > a; git add a
        git commit -qm one; echo secret1 > a; git commit -qam two; git tag v1; git branch b
        git update-ref refs/pull/1 HEAD; git gc -q
        git reset -q --hard HEAD~1; echo secret2 > a; git stash -q
        echo secret3 | git hash-object -w --stdin > /dev/null; git remote add origin https://u:password@example.org/x
        echo staged > s; git add s; echo 2 > a; echo n > new
        mkdir sub; cd sub; git init -q; echo secret4 > x"""
    assert sh(box, script, env={"HOME": "/tmp"}).exit_code == 0
    before = sh(box, "git status --porcelain; git diff; git diff --cached; git symbolic-ref HEAD").output
    assert box.squash() == 2 and "A  s" in before
    assert sh(box, "git status --porcelain; git diff; git diff --cached; git symbolic-ref HEAD").output == before
    everything = sh(box, "git cat-file --batch-all-objects --batch; git log --all --format=%H; git reflog --all; "
                    "cat .git/config; find .git -name '*origin*' -o -name v1 -o -name pull").output
    assert "secret" not in everything and "password" not in everything and "staged" in everything
    assert sh(box, "git rev-list --all | wc -l; git fsck --full 2>&1 | grep -v notice; git commit -qam more && "
              "git rev-list --all | wc -l").output == "1\n2\n"
    assert sh(box, "cat sub/x").output == "secret4\n" and box.squash() == 2


@pytest.fixture
def bubblewrap_box():
    needs("bubblewrap")
    with make("bubblewrap", Environment("host", workdir="/app")) as box: yield box


def test_a_repository_without_git_is_removed(kind):
    """Catches: objects that a program of the agent's can read although no git is there to read them with."""
    with make(kind) as box:
        sh(box, "mkdir -p lib/.git bin; touch lib/.git/x lib/y; for t in find rm; do ln -s $(command -v $t) bin; done")
        result = box.exec(["/bin/sh", "-c", workspace.SQUASH, box.workdir], env={"PATH": "/app/bin"})
        assert result.output == "./lib/.git\n" and sh(box, "ls -A lib").output == "y\n", result


def test_freeze_and_changed(kind):
    """Catches: a process of the agent's that goes on while its files are read; a change outside the workspace that no
    record shows, or scratch files that drown it."""
    with make(kind) as box:
        assert box.changed() == []
        sh(box, """mkdir -p /home/x; echo x | tee in /tmp/t /home/x/y > /dev/null; [ -w /etc ] && rm /etc/shells
            setsid sh -c 'while sleep 0.02; do date +%N > late; done' > /dev/null 2>&1 &""")
        box.freeze()
        first = box._get("/app").read()
        time.sleep(0.3)
        assert box._get("/app").read() == first
        box.freeze()
        assert box.changed() == ["/etc/shells", "/home/x/y"] if kind == "docker" else ["/home/x/y"]


def test_snapshot(kind):
    """Catches: a copy that is not independent, lacks files, links or modes, is another user's, or stays behind."""
    before = remains()
    with make(kind) as box:
        sh(box, "echo kept > f; ln -s f l; mkdir -p /home/d; echo x > /home/d/x; chmod 750 /home/d")
        with box.snapshot() as env:
            sh(box, "echo changed > f")
            for _ in range(2):
                with make(kind, env) as copy:
                    result = sh(copy, "pwd; cat f l /home/d/x; stat -c %a /home/d; echo more >> f; rm l; echo $?")
                    assert result.output == "/app\nkept\nkept\nx\n750\n0\n"
    assert remains() == before
    if kind == "docker":
        assert not docker.from_env().images.list(filters={"label": f"harness_rl.run={RUN}"})


def test_the_last_snapshot(kind):
    """Catches: a verifier's sandbox without the agent's files, with its socket or runtimes, one that a late process of
    the agent's still writes to, files copied for nothing or left."""
    before = remains()
    with make(kind, runtimes={REPO / "tests": "/opt/harness/x"}) as box:
        sh(box, "echo kept > f; mkdir -p /home/d /tests; chmod 0 /home/d; echo x > /tmp/x; echo own > /tests/t")
        assert sh(box, "setsid sh -c 'while :; do date >> late; done' & sleep 60", timeout_s=0.5).timed_out
        box.freeze()
        with box.snapshot(is_last=True) as env, make(kind, env) as last:
            box.stop()
            first = sh(last, "stat -c %s late").output
            assert sh(last, "pwd; cat f /tmp/x /tests/t; stat -c %a /home/d").output == "/app\nkept\nx\nown\n0\n"
            assert sh(last, "ls /opt/harness/x/* /run/model.sock 2> /dev/null").output == ""
            assert sh(last, "stat -c %s late").output == first != "0\n"
            assert kind == "docker" or len(remains()) == len(before) + 1
            with pytest.raises(SandboxError): box.exec(["true"])
    assert remains() == before


def test_nested_folders_take_no_limit_away(kind):
    """Catches: folders within folders past Python's recursion, made in a moment: the watch over time and disk ends, the
    sandbox cannot be removed, and no later run starts, since it cannot be reaped."""
    before = remains()
    with make(kind) as box:
        deep = "cd /home; perl -e 'for (1..1900) { mkdir q(d); chdir q(d) } open F, q(>f)'; sleep 60"
        assert sh(box, deep, timeout_s=5).timed_out
        box.freeze()
        assert box.changed() in ([], [f"/home{'/d' * 1900}/f"])      # no path is longer than 4096 bytes
    assert remains() == before


def test_nested_folders_hide_no_disk_use(kind):
    """Catches: files so deep that no path leads to them, with which an agent fills the host's disk past its limit, and
    so ends everybody's rollouts without a reward."""
    with make(kind, disk_mb=40) as box:
        deep = "cd /home; perl -e '$n = q(d) x 200; for (1..50) { mkdir $n; chdir $n } exec qw(sh -c), shift' "
        fill = "'head -c 30M /dev/zero > a; head -c 30M /dev/zero > b; sleep 60'"
        assert sh(box, deep + fill, timeout_s=30).is_over_disk


def test_disk_limit(kind):
    """Catches: an agent that fills the disk for all, by one large file or by many, and that goes on."""
    with make(kind, disk_mb=40) as box:
        assert sh(box, "head -c 90000000 /dev/zero > big; stat -c %s big; rm big").output.split()[-1] == str(40 << 20)
        result = sh(box, "for i in 1 2 3 4 5; do head -c 20000000 /dev/zero > /tmp/f$i; done; sleep 60", timeout_s=50)
        assert (result.exit_code, result.timed_out, result.is_over_disk) == (137, False, True)
        assert sh(box, "rm /tmp/f*; echo $(ls /tmp | wc -l)").output == "0\n"


def test_a_full_disk_is_a_fault_of_ours(tmp_path):
    """Catches: a disk of the host that is full and that is taken for the agent's or the verifier's failure."""
    needs("bubblewrap")
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "x", tmp_path]).returncode:
        pytest.skip("no right to mount")
    code = """if 1:
        import sandbox
        with sandbox.Bubblewrap(sandbox.Environment("host", workdir="/app"), run_id="full", name="full") as box:
            assert box.exec(["true"]).exit_code == 0
            try: print(box.exec(["sh", "-c", "head -c 100000000 /dev/zero > x; echo 0 > reward"]))
            except sandbox.SandboxError as error: print(error)"""
    try:
        result = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=os.environ | {"TMPDIR": str(tmp_path)},
                                capture_output=True, text=True)
        assert result.stdout.startswith("full: disk full: ") and str(tmp_path) in result.stdout, result
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_an_ordinary_user_of_docker(tmp_path):
    """Catches: a member of group docker, who may not look below /var/lib/docker, and who gets no sandbox for it, or one
    without a disk limit; a record that is silently off."""
    needs("docker")
    sock = Path("/var/run/docker.sock")
    if os.geteuid() or not sock.is_socket(): pytest.skip("needs root, to become another user")
    code = f"""if 1:
        import ctypes, os, sandbox
        os.setgroups([{sock.stat().st_gid}]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1)       # dumpable again: /proc/self is ours
        for _ in range(2):
            with sandbox.Docker(sandbox.Environment("harness-rl/base"), run_id="{RUN}", name="u", disk_mb=40) as box:
                print(box.exec(["id", "-u"]).output.strip(), box.changed())
                write = "for i in 1 2 3; do head -c 20000000 /dev/zero > /tmp/$i; done; sleep 60"
                print(box.exec(["sh", "-c", write], timeout_s=50).is_over_disk)"""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, text=True, capture_output=True)
    assert result.stdout == "0 []\nTrue\n" * 2 and result.stderr.count("no record of tampering") == 1, result


def test_limits_are_set():
    """Catches: limits that are named in the call and never reach the kernel."""
    for kind in ("docker", "bubblewrap"):
        with make(needs(kind), disk_mb=100) as box:
            assert sh(box, "ulimit -n; ulimit -c; ulimit -f").output.split() == ["4096", "0", str(100 << 11)], kind


# ---- tasks ----

def test_plain_dockerfile(kind, tmp_path):
    """Catches: a difference between Docker and bubblewrap, or from what a build would make, in where copies go."""
    folder = task(tmp_path / "t", "# comment\nFROM debian:bookworm-slim\nWORKDIR /app\nWORKDIR sub\n"
                  "ENV A=1 \\\n# comment\n  B='x y'\nCOPY a.txt b ./\nCOPY d /data/d\n"
                  "COPY a.txt /data/renamed\nCOPY a.txt /app\n", a__txt="A", b="B")
    (folder / "environment" / "d").mkdir()
    (folder / "environment" / "d" / "x").write_text("X")
    env = environment(folder, BASE)
    assert (env.base, env.dockerfile, env.workdir) == ("harness-rl/base", None, "/app/sub")
    with make(kind, env) as box:
        output = sh(box, "pwd; echo $A $B; cat a.txt b /data/d/x /data/renamed /app/a.txt").output
        assert output == "/app/sub\n1 x y\nABXAA"


def test_a_stand_in_that_was_made_anew_is_another_image(tmp_path):
    """Catches: an image that is not built again although what stands in for its base has changed; and what a build's
    refusal says: it read as an image that cannot be pulled."""
    needs("docker")
    stand_in = {"debian:bookworm-slim": "harness-rl/test-stand-in"}
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nRUN cat /made\n")
    try:
        for i in range(2):
            build = task(tmp_path / f"base{i}", f"FROM debian:bookworm-slim\nRUN echo {i} > /made\n")
            sandbox._client().api.tag(sandbox.image(environment(build, BASE))["Id"], "harness-rl/test-stand-in")
            with make("docker", environment(folder, stand_in)) as box: assert sh(box, "cat /made").output == f"{i}\n"
    finally: sandbox._client().api.remove_image("harness-rl/test-stand-in", force=True)
    (folder / "environment/Dockerfile").write_text("FROM debian:bookworm-slim\nRUN cat <<END\nHELLO\nEND\n")
    with pytest.raises(SandboxError, match="image build failed.*HELLO"): sandbox.image(environment(folder, BASE))


def test_a_ready_image_s_files(kind, tmp_path):
    """Catches: files beside a `docker_image` without a Dockerfile, which Harbor copies into the workdir, left out."""
    folder = task(tmp_path / "t", "", a__txt="A")
    (folder / "environment/Dockerfile").unlink()
    (folder / "environment/d").mkdir()
    (folder / "environment/d/b").write_text("B")
    env = environment(folder, {"image:1": "harness-rl/base"}, "image:1")
    env.workdir = "/work"
    with make(kind, env) as box: assert sh(box, "pwd; cat a.txt d/b").output == "/work\nAB"
    (folder / "environment/l").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="leads out of the environment"): environment(folder, {}, "image:1")


def test_a_copy_into_a_folder_of_the_image(tmp_path):
    """Catches: a folder of the image that a file of another name replaces, with all that it held."""
    needs("docker")
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nWORKDIR /app/\nCOPY tool /usr/local\n", tool="T")
    with make("docker", environment(folder, BASE)) as box:
        assert sh(box, "pwd; cat /usr/local/tool; ls -d /usr/local/bin").output == "/app\nT/usr/local/bin\n"


@pytest.mark.parametrize("line", ["RUN true", "COPY --chown=1 a /a", "COPY *.txt /a", "COPY $A /a", "ENV A=$B",
                                  "ENV A b", "FROM b", "COPY <<E /a", "WORKDIR $X", 'WORKDIR "/a"', 'COPY ["a", "/a"]', "ADD a /a",
                                  "USER x", 'ENTRYPOINT ["x"]'])
def test_lines_that_need_a_build(tmp_path, line):
    """Catches: a line that is silently skipped or misread instead of built; a refusal that does not say why."""
    env = environment(task(tmp_path / "t", f"FROM debian:bookworm-slim\nWORKDIR /w\n{line}\n", a="x"), BASE)
    assert env.dockerfile == tmp_path / "t" / "environment" and env.build_line == line and env.copies == []
    with pytest.raises(SandboxError, match="(?s)task t: bubblewrap builds no image.*use --sandbox docker") as error:
        make("bubblewrap", env).start()
    assert line in str(error.value)


def test_copies_stay_in_the_environment(tmp_path):
    """Catches: a public task that copies files of the host into a sandbox."""
    (tmp_path / "outside").write_text("secret")
    for number, source in enumerate(["../../outside", "link", "d"]):
        folder = task(tmp_path / str(number), f"FROM x\nCOPY {source} /a\n")
        (folder / "environment" / "link").symlink_to(tmp_path / "outside")
        (folder / "environment" / "d").mkdir()
        (folder / "environment" / "d" / "l").symlink_to("../../../outside")
        with pytest.raises(ValueError, match="leads out of the environment folder"):
            environment(folder)
    with pytest.raises(FileNotFoundError, match="there is no .*nothing"):
        environment(task(tmp_path / "n", "FROM x\nCOPY nothing /a\n"))


def test_image_is_built_once(tmp_path):
    """Catches: concurrent rollouts that build the same image many times; a changed file that is not built again."""
    needs("docker")
    folder = task(tmp_path / "t", "FROM debian:bookworm-slim\nWORKDIR /w\nCOPY a /a\nRUN date +%N%s > /built\n", a=RUN)
    env, tag = environment(folder, BASE), []

    def built(_):
        with make("docker", env) as box:
            tag.append(docker.from_env().containers.get(box.container).image.id)
            return sh(box, "pwd; cat /a /built").output
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(built, range(2))
        assert first == second and first.startswith(f"/w\n{RUN}")
        (folder / "environment" / "a").write_text(RUN + "changed")
        assert built(0).startswith(f"/w\n{RUN}changed")
        (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nRUN echo why; exit 3\n")
        with pytest.raises(SandboxError, match="(?s)task t: image build failed.*why"):
            make("docker", environment(folder, BASE)).start()
    finally:
        for image in set(tag):
            docker.from_env().images.remove(image, force=True)


def test_missing_image_names_the_remedy(kind):
    """Catches: a stack trace, or the host's /usr in the place of an image that is something else."""
    with pytest.raises(SandboxError, match="no-such/image:1=") as error:
        make(kind, Environment("no-such/image:1", task="t")).start()
    assert "task t" in str(error.value) and "--base_image" in str(error.value)


def test_an_image_is_one_for_all_who_need_it(tmp_path):
    """Catches: builds that race for one image, and an image that is built anew for a changed test or instruction."""
    needs("docker")
    tags = []
    envs = [environment(task(tmp_path / str(i), f"FROM debian:bookworm-slim\nRUN echo {RUN} {i}\n"), BASE)
            for i in range(3)]
    try:
        with ThreadPoolExecutor(6) as pool:
            tags = [image["Id"] for image in pool.map(sandbox.image, envs * 2)]
        assert len(set(tags)) == 3 and tags[:3] == tags[3:]
        (tmp_path / "0" / "instruction.md").write_text("changed")
        assert sandbox.image(environment(tmp_path / "0", BASE))["Id"] == tags[0]
    finally:
        for tag in set(tags): docker.from_env().images.remove(tag, force=True)


# ---- choice, end, concurrency ----

def test_choose(kind, monkeypatch):
    """Catches: a choice that says yes without trying, a fallback from what was asked for, errors without a remedy."""
    assert choose(kind) == kind
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(SandboxError, match="start it"):
        choose("docker")
    if kind == "bubblewrap":
        assert choose("auto") == "bubblewrap"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="(?s)dockerd.*apt-get install bubblewrap"):
        choose("auto")
    with pytest.raises(AssertionError, match="podman"):
        choose("podman")


def test_reap_after_kill_9(kind):
    """Catches: what outlives a killed run: containers, processes, folders; a reap of a living run's or a stranger's."""
    code = (f"import sandbox; b = sandbox.SANDBOXES[{kind!r}](sandbox.Environment('harness-rl/base', workdir='/app'), "
            f"run_id='{RUN}-dead', name='n'); b.start(); print('up', flush=True); b.exec(['sleep', '987'])")
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    until(lambda: "sleep\x00987" in processes())
    stranger = docker.from_env().containers.create("harness-rl/base", ["true"]) if kind == "docker" else None
    with make(kind) as alive:
        reap()
        assert owner.poll() is None and "sleep\x00987" in processes()   # its owner lives
        assert sandbox.alive(f"{RUN}-dead") == 1
        os.kill(owner.pid, signal.SIGKILL)
        # not waited for: a zombie is dead as well
        until(lambda: ") Z " in Path(f"/proc/{owner.pid}/stat").read_text())
        assert reap() >= 1
        owner.wait()
        until(lambda: "sleep\x00987" not in processes())
        assert sandbox.alive(f"{RUN}-dead") == 0
        assert not list(Path(tempfile.gettempdir()).glob(f"harness-rl_{RUN}-dead_*"))
        assert sh(alive, "echo alive").output == "alive\n"
    if stranger:
        assert not docker.from_env().containers.list(all=True, filters={"label": f"harness_rl.run={RUN}-dead"})
        stranger.reload()
        stranger.remove()


def test_reap_after_kill_9_while_bwrap_starts():
    """Catches: a bwrap whose run is killed before it has asked to die with it, and that runs its command for ever in a
    folder that was removed under it (without an end to it, 23 of 60 such kills left one)."""
    needs("bubblewrap")
    for i in range(20):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                with sandbox.Bubblewrap(Environment("host"), run_id=f"{RUN}-race", name="n") as box:
                    os.write(writing, b"x"), box.exec(["sleep", "986"])
            finally: os._exit(1)
        assert os.read(reading, 1) == b"x"
        time.sleep(i * 0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0), os.close(reading), os.close(writing)
        assert reap() >= 1
        deadline = time.time() + 60     # one that starts only now finds no folder, and ends
        while f"harness-rl_{RUN}-race" in processes():
            assert time.time() < deadline, f"killed {i} ms after its start"
            time.sleep(0.05)


def test_reap_ends_an_engine_that_a_kill_left(tmp_path, monkeypatch):
    """Would catch vLLM's processes that stay, with gigabytes, when a run is killed while they load; and one whose run
    lives that is ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path)), monkeypatch.setattr(tempfile, "tempdir", None)
    engines = {}
    for name in ("dead", "alive"):
        folder = tmp_path / f"hrl-{name}"
        folder.mkdir()
        (folder / ".lock").touch()
        os.utime(folder / ".lock", (1, 1))
        engines[name] = subprocess.Popen(["sleep", "60"], env=os.environ | {"VLLM_RPC_BASE_PATH": str(folder)})
    with open(tmp_path / "hrl-alive/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sandbox.reap()
    assert engines["dead"].wait(60) == -9 and engines["alive"].poll() is None
    assert not (tmp_path / "hrl-dead").exists() and (tmp_path / "hrl-alive").exists()
    engines["alive"].kill(), engines["alive"].wait()


def test_reap_finds_what_else_a_run_leaves(kind):
    """Catches: networks, snapshots and sockets' folders that outlive a killed run, or of a living one removed."""
    code = (f"import sandbox, tempfile, fcntl, time; "
            f"b = sandbox.SANDBOXES[{kind!r}](sandbox.Environment('harness-rl/base', workdir='/app', "
            f"internet={kind == 'docker'}), run_id='{RUN}-rest', name='n'); b.start(); s = b.snapshot(); "
            "s.__enter__(); "
            "f = tempfile.mkdtemp(prefix='hrl-'); l = open(f + '/.lock', 'w'); fcntl.flock(l, fcntl.LOCK_EX); "
            "print(f, flush=True); time.sleep(100)")
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)
    folder = Path(owner.stdout.readline().strip())
    os.utime(folder / ".lock", (0, 0))

    def rest():
        found = [str(p) for p in Path(tempfile.gettempdir()).glob(f"harness-rl_{RUN}-rest_*")]
        if kind == "docker":
            client, label = docker.from_env(), {"label": f"harness_rl.run={RUN}-rest"}
            found += [*client.networks.list(filters=label), *client.images.list(filters=label),
                      *client.containers.list(all=True, filters=label)]
        return len(found), folder.exists()
    reap()
    assert rest() == (3 if kind == "docker" else 2, True)
    owner.kill()
    owner.wait()
    reap()
    assert rest() == (0, False)


def test_internet_is_a_network_of_the_run_s_own(kind):
    """Catches: a task with access that shares a network with strangers, and neighbours that reach each other."""
    online = Environment("harness-rl/base", workdir="/app", internet=True, task="t")
    if kind == "bubblewrap":
        with pytest.raises(SandboxError, match="task t.*--sandbox docker"): make(kind, online).start()
        return
    with make(kind, online) as first, make(kind, online) as second:
        assert sh(first, "tail -n +3 /proc/net/dev | cut -d: -f1").output.split() == ["lo", "eth0"]
        networks = docker.from_env().containers.get(second.container).attrs["NetworkSettings"]["Networks"]
        assert list(networks) == [f"harness-rl-{RUN}"]
        address = networks[f"harness-rl-{RUN}"]["IPAddress"]
        server = "IO::Socket::INET->new(Listen => 1, LocalPort => 99) or die; print qq(up\n); sleep 30"
        sh(second, f"perl -MIO::Socket::INET -e '$| = 1; $s = {server}' > up & until grep -q up up; do sleep 0.1; done")
        assert second.exec(["bash", "-c", "echo > /dev/tcp/127.0.0.1/99"]).exit_code == 0
        reach = f"(timeout 2 bash -c 'echo > /dev/tcp/{address}/99') 2> /dev/null && echo open || echo closed"
        assert first.exec(["bash", "-c", reach]).output == "closed\n"
    reap(RUN)
    assert not docker.from_env().networks.list(filters={"label": f"harness_rl.run={RUN}"})


def processes():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return "\n".join(found)


@contextlib.contextmanager
def once_up(tmp_path, do):
    """-> a log: when the command that writes it has said something, `do` is called from another thread."""
    log = tmp_path / "log"

    def wait():
        until(lambda: log.exists() and log.stat().st_size)
        do()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try: yield log
    finally:
        thread.join(300)
        log.unlink()


def test_stop(kind, tmp_path):
    """Catches: a second stop that fails, one that leaves files or hangs a running exec, a failed start left behind."""
    before = remains()
    box = make(kind)
    box.start()
    assert len(remains()) == len(before) + 1
    start = time.time()
    with once_up(tmp_path, box.stop) as log, contextlib.suppress(SandboxError):
        sh(box, "mkdir -p locked/x; chmod 0 locked; echo up; sleep 600", log=log)
    assert time.time() - start < 300
    box.stop()
    box.stop()
    assert remains() == before
    with pytest.raises(FileNotFoundError):
        make(kind, Environment("harness-rl/base", copies=[(Path("/nowhere"), "/tmp/x")])).start()
    with pytest.raises(KeyboardInterrupt), make(kind):
        raise KeyboardInterrupt
    assert remains() == before


def test_a_sandbox_that_is_gone_is_a_fault_of_ours(kind, tmp_path):
    """Catches: a container that someone removed, taken for an agent that deleted its workspace, which pays 0."""
    with make(kind) as box, make(kind) as other:
        if kind == "docker": docker.from_env().containers.get(box.container).remove(force=True)
        else: box.stop()
        with pytest.raises(SandboxError): box.exec(["true"])
        with pytest.raises(SandboxError): box.carry("/app", other)
        with pytest.raises(SandboxError): box.get("/app/x", tmp_path / "x")


def test_a_kill_from_outside_is_a_fault_of_ours(kind, tmp_path):
    """Catches: a container that a restart of the daemon ended, taken for an agent's failure; and an agent's own kill
    taken for one of ours, which would let it leave the statistics."""
    with make(kind) as box:
        def kill():
            if kind == "docker": docker.from_env().api.kill(box.container)
            else: box.running[-1].kill()
        with once_up(tmp_path, kill) as log, pytest.raises(SandboxError, match="from outside|outside it"):
            sh(box, "echo up; sleep 60", log=log)
        assert sh(box, "kill -9 $$").exit_code == 137
        with once_up(tmp_path, box.kill) as log: assert sh(box, "echo up; sleep 60", log=log).exit_code == 137


def test_a_disk_that_was_full_is_a_fault_of_ours():
    """Catches: a command that is killed since others had filled the disk, told as its own writing when there is room
    again by the time that it has ended."""
    needs("bubblewrap")

    class Crowded(sandbox.Bubblewrap):
        left_mb = iter([100])
        def _host_mb(self): return next(self.left_mb, 9999)
    with Crowded(Environment("host"), run_id=RUN, name="crowded") as box:
        with pytest.raises(SandboxError, match="disk full"): box.exec(["sleep", "60"])


def test_a_fault_of_the_host_is_no_missing_file(kind, tmp_path):
    """Catches: an archive that breaks off, of which the beginning is carried over, and what is missing on the host
    taken for a file that the agent deleted: both would pay 0."""
    with make(kind) as box, make(kind) as other:
        sh(box, "head -c 5000 /dev/urandom > a; echo x > b")
        if kind == "bubblewrap":
            shutil.rmtree(box.folder / "etc")
            with pytest.raises(SandboxError): box.carry("/app", other)
            return
        whole = box._get("/app").read()
        for num_bytes in (1024, len(whole) - 2048):
            with tempfile.TemporaryFile() as file, pytest.raises((SandboxError, tarfile.TarError)):
                file.write(whole[:num_bytes]), file.seek(0)
                list(sandbox._members(tarfile.open(fileobj=file), "/app"))


def test_concurrency(kind):
    """Catches: state or clients shared between threads, output that is lost now and then, leaked descriptors."""
    def one(number):
        with make(kind) as box:
            return [sh(box, f"echo {number} >> f; cat f", timeout_s=60).output for _ in range(8)]
    one(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        for number, outputs in enumerate(pool.map(one, range(16))):
            assert outputs == [f"{number}\n" * (i + 1) for i in range(8)]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 24   # 16: kept connections to the daemon


def living(groups):
    """Processes, no zombies, of these process groups."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            found += [path] if state not in "ZX" and int(group) in groups else []
    return found


@pytest.mark.parametrize("how", ["stop", "kill -9"])
def test_stop_while_a_command_starts(how):
    """Would catch a bwrap killed before it has set itself up, whose child then waits for ever and holds the output
    open: the exec never returns, an interrupted run hangs, and the child stays."""
    needs("bubblewrap")
    for i in range(40 if how == "stop" else 20):
        with make("bubblewrap", Environment("host", workdir="/app")) as box:
            def work():
                with contextlib.suppress(SandboxError): box.exec(["sleep", "60"])
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            time.sleep(i * 0.0004)
            if how == "kill -9":
                while not box.running: time.sleep(0.0001)
                box.running[0].kill()
            else: box.stop()
            thread.join(20)
            assert not thread.is_alive(), f"stopped {i * 0.4:.1f} ms after its start, the command never returned"
            deadline = time.time() + 20
            while left := living([process.pid for process in box.running]):
                assert time.time() < deadline, left
                time.sleep(0.01)

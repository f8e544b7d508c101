"""harnesses/: bash agent and forwarder against a scripted model on a unix socket, and the runtime in real sandboxes."""
import http.server
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import harnesses
from conftest import until
from sandbox import Bubblewrap, Environment

FORWARD, AGENT = [sys.executable, ROOT / "harnesses/forward.py"], [sys.executable, ROOT / "harnesses/bash_agent.py"]
needs_bwrap = pytest.mark.skipif(bool(Bubblewrap.problem()), reason="bubblewrap does not run here")


class Model(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers request number i with script[i]: a text, or (status, headers, raw body). Keeps the request bodies."""
    daemon_threads, request_queue_size = True, 64

    def __init__(self, folder, script):
        self.path, self.script, self.requests = str(folder / "model.sock"), script, []
        super().__init__(self.path, Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        step = self.server.script[len(self.server.requests) - 1]
        status, headers, body = (200, {}, reply(step)) if isinstance(step, str) else step
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def reply(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}, ensure_ascii=False).encode()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def forwarded(tmp_path, command, **env):
    """Runs a command under forward.py in tmp_path/work, with the model socket of tmp_path."""
    (tmp_path / "work").mkdir(exist_ok=True)
    port = str(free_port())
    env = {**os.environ, "FORWARD_PORT": port, "FORWARD_SOCKET": str(tmp_path / "model.sock"),
           "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", **env}
    command = [*FORWARD, *command]
    return subprocess.run(command, cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=100)


def episode(tmp_path, script, instruction="Do it.", **env):
    model = Model(tmp_path, script)
    result = forwarded(tmp_path, AGENT, INSTRUCTION=instruction, **env)
    model.shutdown()
    return result, model.requests


def shown(requests):
    """What the last request showed of the last command."""
    return requests[-1]["messages"][-1]["content"]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- the agent ----

def test_history_extends_exactly(tmp_path):
    """Would catch a reply stripped, unfenced or re-encoded in the history: each turn would fork the rollout's tree."""
    replies = ["  echo 'é≥✓' > \"a b\"; cat 'a b'\n", "Sure:\n```bash\nprintf '\\xff'; exit 3\n```\nDone.", " DONE\n"]
    result, requests = episode(tmp_path, replies, "Größe ≠ 0?")
    assert result.returncode == 0 and len(requests) == 3, result
    first, second, third = (request["messages"] for request in requests)
    assert [message["role"] for message in first] == ["system", "user"] and first[1]["content"] == "Größe ≠ 0?"
    turns = (first, second, replies[0], "exit 0\né≥✓"), (second, third, replies[1], "exit 3\n\ufffd")
    for before, after, text, output in turns:
        assert after == [*before, {"role": "assistant", "content": text}, {"role": "user", "content": output}]
    assert (tmp_path / "work" / "a b").read_text() == "é≥✓\n"


@pytest.mark.parametrize("text", ["```bash\necho 1 > f\n```", "```\necho 1 > f\n```", "So `f`:\n```sh\necho 1 > f\n```",
                                  "```echo 1 > f```", "```bash\necho 1 > f", "echo 1 > f"])
def test_fence(tmp_path, text):
    """Would catch a fence whose language word, prose around it or missing end is run as a command."""
    assert episode(tmp_path, [text, "DONE"])[0].returncode == 0
    assert (tmp_path / "work/f").read_text() == "1\n" and os.listdir(tmp_path / "work") == ["f"]


def test_a_command_with_a_nul_byte_is_run_without_it(tmp_path):
    """Would catch a reply that no process can be started with, and that ends the agent."""
    result, requests = episode(tmp_path, ["echo a\0b", "DONE"])
    assert result.returncode == 0 and shown(requests) == "exit 0\nab", result


def test_time_limit_kills_the_children_too(tmp_path):
    """Would catch a time-out that kills bash alone, or one that waits for a grandchild which holds the pipe."""
    command = "echo before; sleep 600 & echo $! > pid; wait"
    result, requests = episode(tmp_path, [command, "DONE"], COMMAND_TIMEOUT_S="5")
    assert result.returncode == 0 and shown(requests).startswith("timeout: killed after 5 s\nbefore"), result
    until(lambda: not is_alive((tmp_path / "work/pid").read_text().strip()), 60)


def test_background_process_does_not_hold_the_turn(tmp_path):
    """Would catch an agent that waits for the end of the output: to start a server would cost the time limit."""
    result, requests = episode(tmp_path, ["sleep 600 & echo $! > pid; echo ok", "DONE"], COMMAND_TIMEOUT_S="600")
    os.kill(int((tmp_path / "work/pid").read_text()), 9)
    assert shown(requests) == "exit 0\nok", result


def test_long_output_is_cut_in_the_middle(tmp_path):
    """Would catch output that is passed on whole (the context overflows) or cut at the end, where the error stands."""
    _, requests = episode(tmp_path, ["echo START; yes ✓ | head -c 5000000; echo END; exit 4", "DONE"])
    text = shown(requests)
    assert text.startswith("exit 4\nSTART\n") and text.endswith("END") and "5000010 bytes" in text and len(text) < 700


def test_refusal_ends_at_once(tmp_path):
    """Would catch retries of a closed session (403) that go on after the rollout's end, and a status that hides it."""
    result, requests = episode(tmp_path, [(403, {}, b"session closed")])
    assert result.returncode == 3 and len(requests) == 1
    assert result.stdout.endswith("--- api failed: status 403: session closed\n")


def test_server_faults_are_retried_with_the_same_request(tmp_path):
    """Would catch an agent that gives up on a 500 or a broken answer, or that alters the request it repeats."""
    script = [(500, {}, b"busy"), (200, {"Content-Length": "999"}, b'{"choices"'), (200, {}, b""), "DONE"]
    result, requests = episode(tmp_path, script)
    assert result.returncode == 0 and len(requests) == 4 and all(request == requests[0] for request in requests)


def test_gives_up_without_a_model(tmp_path):
    """Would catch an endless retry, or exit 0 (an "ok" rollout without a call) when no model can be reached."""
    result = forwarded(tmp_path, AGENT, INSTRUCTION="x")
    assert result.returncode == 3 and "api failed" in result.stdout and "model.sock" in result.stderr


def test_chunked_answer(tmp_path):
    """Would catch chunk sizes that end up in the reply: servers may stream early bytes to keep a client waiting."""
    body = reply("echo ✓ > f")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (b"  ", body[:20], body[20:])) + b"0\r\n\r\n"
    result, _ = episode(tmp_path, [(200, {"Transfer-Encoding": "chunked"}, chunks), "DONE"])
    assert result.returncode == 0 and (tmp_path / "work/f").read_text() == "✓\n", result


def test_max_turns(tmp_path):
    """Would catch a loop without end, one reply too few, and a run without a final answer that passes for a finished one."""
    result, requests = episode(tmp_path, ["echo x >> f"] * 9, MAX_TURNS="3")
    assert result.returncode == 4 and len(requests) == 3 and (tmp_path / "work/f").read_text() == "x\n" * 3


# ---- the forwarder ----

def test_forwarder_streams_and_half_closes(tmp_path):
    """Would catch a forwarder that does not stream, or that drops the answer when the client has finished sending."""
    def serve():
        with server.accept()[0] as sock:
            request = b"".join(iter(lambda: sock.recv(65536), b""))    # to the client's half-close
            sock.sendall(request[-5:])
            seen.wait(10)              # the client must get the first bytes before the others exist
            sock.sendall(b"x" * 3_000_000 + b"end")
    client = """if 1:
        import os, socket
        sock = socket.create_connection(("127.0.0.1", int(os.environ["FORWARD_PORT"])))
        sock.sendall(b"y" * 2_000_000 + b"hello"); sock.shutdown(socket.SHUT_WR)
        assert sock.recv(5) == b"hello"
        open("seen", "w").close()
        rest = b"".join(iter(lambda: sock.recv(65536), b""))
        assert len(rest) == 3_000_003 and rest.endswith(b"end"), len(rest)"""
    seen = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "model.sock"))
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        threading.Thread(target=lambda: (wait_for(tmp_path / "work/seen"), seen.set()), daemon=True).start()
        result = forwarded(tmp_path, [sys.executable, "-c", client])
    assert result.returncode == 0, result


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def test_forwarder_passes_a_broken_connection_on(tmp_path):
    """Would catch a client's death that never reaches the model: it would go on sampling for nobody."""
    def serve():
        if server.accept()[0].recv(1) == b"": (tmp_path / "work/gone").touch()
    client = """exec 3<>/dev/tcp/127.0.0.1/$FORWARD_PORT; sleep 0.2; exec 3>&-
        for i in $(seq 300); do [ -e gone ] && exit; sleep 0.1; done; exit 1"""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "model.sock"))
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        assert forwarded(tmp_path, ["bash", "-c", client]).returncode == 0


@pytest.mark.parametrize("command, code", [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_forwarder_exits_as_the_command_does(tmp_path, command, code):
    """Would catch a failure inside that looks like a success outside, and background processes that outlive it."""
    result = forwarded(tmp_path, ["bash", "-c", f"sleep 600 >&- 2>&- & echo $! > pid; {command}"])
    assert result.returncode == code
    until(lambda: not is_alive((tmp_path / "work/pid").read_text().strip()), 60)


# ---- harnesses and their runtime ----

def test_load():
    """Would catch a harness that is listed and does not load, and an error that does not help."""
    assert "bash" in harnesses.names() and all(map(harnesses.load, harnesses.names()))
    for name in ("nosuch", "forward", "__init__", "../bash"):
        with pytest.raises(ValueError, match=r"unknown harness .*; there are: .*bash"):
            harnesses.load(name)
    assert harnesses.load("bash").demonstrate(["ls", "rm x"]) == ["ls", "rm x", "DONE"]
    with pytest.raises(ValueError, match="unknown runtime 'cobol'"):
        harnesses.runtime("cobol")


def test_concurrent_builds_leave_one_runtime(tmp_path):
    """Would catch ranks that start together and use a half-copied runtime, or fail because it is there already; and
    what a killed build leaves behind for ever."""
    (tmp_path / "building-killed").mkdir()
    os.utime(tmp_path / "building-killed", (0, 0))
    env = {**os.environ, "HARNESS_RL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "harnesses", "build", "bash"]
    builds = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [build.communicate()[0].splitlines()[0] for build in builds]
    folder, = tmp_path.iterdir()
    assert all(build.returncode == 0 for build in builds) and all(str(folder) in line for line in lines)
    assert sum(path.lstat().st_size for path in folder.rglob("*")) < 70e6


@needs_bwrap
def test_runtime_stands_alone(tmp_path):
    """Would catch a runtime that takes its loader, a library or a module from the host: other images have none."""
    code = "import ctypes, json, lzma, os, sqlite3, socket, ssl, sys; print(sys.prefix, sys.flags.utf8_mode)"
    command = ["bwrap", "--unshare-all", "--clearenv", "--proc", "/proc", "--dev", "/dev",
               "--ro-bind", harnesses.runtime("python"), harnesses.PATHS["python"], *harnesses.PYTHON, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "/opt/harness/python 1\n", result


@needs_bwrap
def test_episode_in_a_sandbox(tmp_path):
    """Would catch a launch line that works on the host only, and what of the harness leaks into the commands."""
    bash, model = harnesses.load("bash"), Model(tmp_path, ["echo hi > f; env | cut -d= -f1", "DONE"])
    place = {"runtimes": bash.mounts(), "socket": Path(model.path)}
    with Bubblewrap(Environment("host", "/app"), run_id="test", name="bash", **place) as box:
        result = box.exec(bash.argv, env={**bash.env, "INSTRUCTION": "Write hi to f."}, timeout_s=20)
        assert result.exit_code == 0 and not result.timed_out, result
        box.get("/app/f", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "hi\n" and len(model.requests) == 2
    assert set(shown(model.requests).split()) == {"exit", "0", "HOME", "PATH", "PWD", "SHLVL", "_"}

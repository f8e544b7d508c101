"""What the tests of the model's side share: a tiny random model, engines over it, clients, tasks. All of it real."""
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
QUICK = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
         "TRANSFORMERS_VERBOSITY": "error",        # for this process, its engines and commands
         "OMP_NUM_THREADS": "1"}                   # tiny models: threads that wait for each other take far longer
for name, value in QUICK.items():
    os.environ.setdefault(name, value)
ENGINE = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]    # as train.py

import httpx
import pytest

import sandbox

# ChatML with tools and tool calls as Hermes writes them; SmolLM2's own template renders none.
TEMPLATE = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(folder, positions, template=TEMPLATE, tokens=()):
    """A Llama of 2 layers with random weights, large enough that each weight and each earlier token matters; tied,
    as SmolLM2 is. tokens: further ones of the vocabulary."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import proxy
    tokenizer = AutoTokenizer.from_pretrained(proxy.resolve_model("smollm2"))
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(tokens))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=positions, initializer_range=0.1,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny", 4096)


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    """The same with a context that real harnesses fit into."""
    return make_model(tmp_path_factory.mktemp("model") / "roomy", 131072)


@pytest.fixture(scope="session")
def tokenizer(tiny):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def scripted(tiny):
    """A proxy whose sessions say what their script says."""
    import proxy
    with proxy.Proxy(tiny, max_model_len=1024, engine="scripted", engine_args=ENGINE) as p:
        yield p


@pytest.fixture(scope="module")
def real(tiny):
    """A proxy over vLLM itself."""
    import proxy
    with proxy.Proxy(tiny, max_model_len=1024, engine="vllm", engine_args=ENGINE) as p:
        yield p


def until(condition, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def endless(monkeypatch):
    """Requests may say ignore_eos: a reply is then as long as its max_tokens, whatever the policy says."""
    import proxy
    monkeypatch.setattr(proxy, "HARNESS_CHOOSES", (*proxy.HARNESS_CHOOSES, "ignore_eos"))


@contextlib.contextmanager
def engine_prompts(proxy):
    """-> list that fills with the token ids of each prompt that the engine is given."""
    core, given = proxy.engine.engine_core, []

    class Spy(type(core)):
        async def add_request_async(self, request):
            given.append(list(request.prompt_token_ids))
            await super().add_request_async(request)
    core.__class__ = Spy
    try: yield given
    finally: core.__class__ = Spy.__bases__[0]


@pytest.fixture
def connect(tmp_path):
    """connect(proxy, script) -> a session; connect.client(session) -> httpx over its socket. All closed at the end."""
    opened, clients = [], []

    def connect(proxy, script=None, **kw):
        header = {"task": "t", "harness": "h", "model": "tiny"}
        session = proxy.open_session(f"s{len(opened)}", tmp_path / f"s{len(opened)}.jsonl", header, script=script, **kw)
        opened.append((proxy, session))
        return session

    def client(session, web=httpx, **kw):
        transport = web.HTTPTransport(uds=session.address)
        clients.append(web.Client(transport=transport, base_url="http://model", timeout=60, **kw))
        return clients[-1]
    connect.client = client
    yield connect
    for c in clients: c.close()
    for proxy, session in opened: proxy.close_session(session)


@pytest.fixture(scope="session")
def shell_tasks(tmp_path_factory):
    """The folder of all generated shell tasks."""
    from tasks import shell
    return shell.generate(tmp_path_factory.mktemp("tasks") / "shell")


def runs(kind: str) -> str:
    """This kind of sandbox, or a skip where it does not run and this is no CI."""
    problem = sandbox.SANDBOXES[kind].problem()
    if problem and not os.environ.get("CI"): pytest.skip(problem)
    assert not problem, problem
    return kind


@pytest.fixture(scope="session")
def bubblewrap():
    return runs("bubblewrap")


@pytest.fixture(scope="session")
def docker():
    return runs("docker")


@pytest.fixture(scope="session")
def far_daemon(docker, tmp_path_factory):
    """-> the environment in which Docker is on another machine: a second daemon, reached by TLS, which does not see our
    temporary files, runtimes and network, as we do not see its files. The network above all: a daemon that is told to
    have no bridge removes docker0, whosever it is."""
    if os.geteuid() or not shutil.which("dockerd"): pytest.skip("needs root and dockerd")
    folder, cache = tmp_path_factory.mktemp("far"), Path.home() / ".cache"
    server = socket.create_server(("127.0.0.1", 0))             # inherited, so it stays in our network
    port, number = server.getsockname()[1], server.fileno()
    keys = """openssl req -x509 -newkey rsa:2048 -nodes -keyout ca-key.pem -out ca.pem -subj /CN=ca -days 2
        for name in cert server; do
            openssl req -newkey rsa:2048 -nodes -keyout $name-key.pem -out $name.csr -subj /CN=127.0.0.1
            echo 'subjectAltName=IP:127.0.0.1' > ext
            openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca-key.pem -out $name.pem -days 2 -extfile ext
        done; cp cert-key.pem key.pem"""
    subprocess.run(["sh", "-ec", keys], cwd=folder, check=True, capture_output=True)
    start = f"""mkdir -p {cache}; cp -r {folder} /run/hrl-far; mount -t tmpfs x /tmp; mount -t tmpfs x {cache}
        cp -r /run/hrl-far /tmp/keys; rm -r /run/hrl-far; cd /tmp/keys
        exec env LISTEN_FDS=1 LISTEN_PID=$$ dockerd --host fd:// --bridge none --iptables=false \\
            --data-root /tmp/data --exec-root /tmp/exec --pidfile /tmp/pid \\
            --tlsverify --tlscacert ca.pem --tlscert server.pem --tlskey server-key.pem 3<&{number}"""
    # REQUESTS_CA_BUNDLE, where it is set, would take the place of the daemon's own authority
    env = {"DOCKER_HOST": f"tcp://127.0.0.1:{port}", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(folder),
           "REQUESTS_CA_BUNDLE": str(folder / "ca.pem")}
    with open(folder / "log", "w") as log:
        # vLLM has put a library into LD_PRELOAD by now, which the daemon may not see: its shims fail over the warning
        daemon = subprocess.Popen(["unshare", "-m", "-n", "bash", "-ec", start], stdout=log, stderr=log,
                                  pass_fds=[number], env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})
    try:
        for _ in range(300):
            is_up = not subprocess.run(["timeout", "2", "docker", "version"], env=os.environ | env,
                                       capture_output=True).returncode
            if is_up: break
            assert daemon.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        assert is_up, (folder / "log").read_text()[-2000:]
        image = subprocess.Popen(["docker", "save", "harness-rl/base"], stdout=subprocess.PIPE)
        subprocess.run(["docker", "load", "-q"], stdin=image.stdout, env=os.environ | env, check=True)
        assert image.wait() == 0
        yield env
    finally:
        daemon.terminate()
        daemon.wait(60)
        server.close()


def make_task(folder: Path, instruction="Do it.", solution="true", test="echo 1 > /logs/verifier/reward.txt", toml="",
              dockerfile=""):
    """A task in Harbor's format: test is run with /logs/verifier there; toml and dockerfile are appended."""
    for name in ("environment/files", "tests", "solution"): (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text(instruction)
    (folder / "task.toml").write_text(f'version = "1.0"\n{toml}')
    lines = f"FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n{dockerfile}"
    (folder / "environment/Dockerfile").write_text(lines)
    (folder / "environment/files/here.txt").write_text("here\n")
    (folder / "tests/test.sh").write_text(f"mkdir -p /logs/verifier\n{test}\n")
    (folder / "solution/solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    return folder

"""A rollout: one harness run on one task, in a sandbox, verified, its outcome on record.

    python rollout.py --tasks DIR --harness bash --model smollm2 --n 2 --out runs/eval  # pass rate with a 95 % interval
    python rollout.py --tasks DIR --harness oracle --out runs/oracle   # must score 1 everywhere, nop 0: else status 1
    python rollout.py --tasks DIR --prebuild                           # builds or pulls every image, runs nothing
    python rollout.py ... --engine scripted --script FILE
                                        # FILE's lines in the model's place; `solution`: each task's own
    python rollout.py compare A B       # two folders of records or runs of train.py, paired by task: difference, p

build (image or copies) -> agent (no network but the model's socket; neither tests nor solution present; git history
squashed) -> verify (tests put in now, no process of the agent alive), in one of three modes (--verify):
    strict         a fresh sandbox from the task's image, only the workspace carried over: see workspace.py
    compat         a new sandbox from all the agent's files, for tests that look outside the workspace
    history        compat, and git history stays as the image has it, for tasks about history
auto: as task.toml says ([metadata] verify = "compat"), else the strictest mode under which the oracle last scored 1
(remembered for the task's content and kind of sandbox), else strict. One JSONL a rollout (tree.py), beside it the
harness's and the verifier's output (.log). --off takes defences away by name: git (history squashed for the agent, the
image's own for the verifier), tools, links (workspace.py), tamper (the record tells what the agent changed outside
the workspace).

Outcomes, and what becomes of the reward:
    ok             the harness ended with status 0                   the verifier's
    overlong       the harness ran out of turns without a final answer, or asked on past --max_calls or
                   --max_rollout_tokens                              0: else a policy learns never to stop
    timeout        the agent's time limit ended it                   the verifier's, of what stood then
    harness_error  the harness ended with another status and without a final answer, or its last request failed
                                                                     the verifier's: exit status is no success signal
    verifier_error the verifier wrote no reward or no number         none: leaves loss and statistics; 0 if overlong,
                   and of a model if the oracle has scored 1 in this mode and what was left is the likely cause: not
                   where the verifier was killed (137), paid calls wrongly, did not name what counts, or was out of
                   time though the oracle's had taken over a tenth of the limit
    infra_error    sandbox, image, disk or engine failed             none
    no_calls       the harness never reached the model               none, and a warning
    stale          it outlived `train.py --max_staleness`            none
Tasks are in Harbor's format: instruction.md, task.toml (both schemas), environment/Dockerfile or docker_image,
tests/test.sh -> /logs/verifier/reward.txt (a number) or reward.json (numbers by name; of both the one written last that
has a reward), solution/solve.sh. A task that says nothing of internet access has it with --internet on alone, though
Harbor's default is the opposite; other defaults of ours are 10 minutes for agent and verifier, 1 CPU, 2 GB of memory,
10 GB of disk. Refused by name: compose files, GPUs, Windows, MCP servers, health checks, several steps, sandboxes of
the verifier's own, lists of allowed hosts, a network for one stage alone.
In reward.json "call_N" is, for as many N as wanted, what call N is paid beside the rollout's reward, which is there,
too (`train.py --call_rewards`), others 0. N is the call's id, from 0 in order of arrival, aborted and side calls too:
for the verifier /logs/agent/calls.json lists them, [{"id", "kind", "finish", "text": what was sampled}]. A call that
there is not or a value that is no finite number is a verifier_error. Overlong rollouts are paid for no call; oracle and
nop have none."""
import argparse, concurrent.futures, contextlib, difflib, functools, hashlib, json, math, multiprocessing, os, re, \
    shlex, shutil, signal, sys, tempfile, threading, time, tomllib, traceback, uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, variance

import numpy as np
from tqdm import tqdm

import graft, harnesses, proxy as boundary, sandbox, tree

WITHOUT_MODEL = ("oracle", "nop")
SPENT_S = 10                            # how long a harness may go on when its budget of calls or tokens is used up
VERIFY = ("strict", "compat", "history")
DEFENCES = ("git", "tools", "links", "tamper")
OUT_OF_TIME = "tests/test.sh ran out of time"           # how the detail of its rollout begins
NOT_THE_AGENT_S = re.compile("(?i)no space left|disk full|timed out|outside it has killed")     # SandboxErrors
ENGINE_DEAD = "vLLM's engine is dead; VLLM_LOGGING_LEVEL=INFO tells why"
CANARY = re.compile(r"(?i)\A(?:\s*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*(?:\n|\Z))+")      # Harbor leaves it out, too
MAX_REWARD = 1e15                       # float32 must hold the squares of sums
READ = {                                # keys of task.toml that are read; [metadata] and [task] are their authors'
    "": "version schema_version task metadata agent verifier environment solution artifacts source steps",
    "agent": "timeout_sec user network_mode allowed_hosts",
    "verifier": "timeout_sec user env network_mode environment_mode allowed_hosts environment collect",
    "environment": "build_timeout_sec docker_image os cpus memory_mb storage_mb memory storage gpus gpu_types env "
                   "workdir allow_internet network_mode allowed_hosts mcp_servers healthcheck tpu", "solution": "env"}


# --- tasks ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    id: str                             # folder relative to the set, with the set's own name before it: train/copy-03
    path: Path
    instruction: str
    env: sandbox.Environment
    agent_timeout_s: float
    verifier_timeout_s: float
    limits: dict                        # memory_mb, cpus, disk_mb of the sandbox
    category: str                       # of [metadata], else the id
    verify: str = ""                    # of [metadata]: one of VERIFY, "" = not said
    users: dict = field(default_factory=dict)       # agent, verifier -> user inside ("" = the image's)
    envs: dict = field(default_factory=dict)        # verifier, solution -> environment variables
    artifacts: tuple = ()               # paths inside that are kept beside the record
    unread: tuple = ()                  # keys of task.toml that mean nothing here

    def solution(self) -> list:
        """The commands of solution/solve.sh, a line each."""
        lines = (self.path / "solution" / "solve.sh").read_text().splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]

    @functools.cached_property
    def digest(self) -> str:
        """Of all that the task's folder held when this was first asked for."""
        digest = hashlib.sha256()
        for file in sorted(p for p in self.path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(self.path)} {file.stat().st_size} ".encode() + file.read_bytes())
        return digest.hexdigest()[:32]

    def mode_file(self, kind: str, proven="") -> Path:
        """Where the verify mode that the oracle found is remembered, for this content and kind of sandbox; proven: of
        the mode in which the oracle last scored 1, the seconds that verifying took."""
        return harnesses.cache() / "verify" / "-".join(filter(None, (self.digest, kind, proven)))


class Settings(dict):
    """A task's task.toml; what is wrong with it is a ValueError that names the remedy."""
    def __init__(self, path: Path):
        self.path = path
        try: super().__init__(tomllib.loads((path / "task.toml").read_text()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ValueError(f"task {path}: task.toml: {e}") from None
        for section in ("agent", "verifier", "environment", "metadata", "solution"):
            if not isinstance(self.setdefault(section, {}), dict):
                self.wrong(f"{section} is no table", f"write [{section}]")

    def unread(self) -> tuple:
        """Keys that mean nothing here, each with a known one that it may be a misspelling of."""
        found = []
        for section, known in READ.items():
            for key in sorted((self[section] if section else self).keys() - set(known.split())):
                near = "".join(f" (is it {x}?)" for x in difflib.get_close_matches(key, known.split(), 1))
                found.append((f"[{section}] " if section else "") + key + near)
        return tuple(found)

    def wrong(self, what, remedy): raise ValueError(f"task {self.path}: task.toml: {what}; {remedy}")

    def number(self, section, key, default):
        value = self[section].get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.01 <= value < math.inf:
            self.wrong(f"[{section}] {key} = {value!r}", "a number of at least 0.01 is needed")   # 0: no limit
        return value

    def megabytes(self, key, default):                      # memory_mb = 2048, or memory = "2G" in the older schema
        text = self["environment"].get(key)
        if text is None or f"{key}_mb" in self["environment"]:
            return math.ceil(self.number("environment", f"{key}_mb", default))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(text), re.I)
        if not match: self.wrong(f"[environment] {key} = {text!r}", "a size as 512M or 2G is needed")
        return max(1, int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) - 1)))

    def variables(self, section):                           # ${NAME} and ${NAME:-default} are the host's
        def host(match):
            if (value := os.environ.get(match[1], match[2])) is None:
                self.wrong(f"[{section}] env names ${{{match[1]}}}", "set it in the environment of this command")
            return value
        env = self[section].get("env", {})
        if not isinstance(env, dict): self.wrong(f"[{section}] env = {env!r}", "a table is needed")
        return {k: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", host, str(v)) for k, v in env.items()}

    def artifacts(self):                                    # "/path", or {source = "/path", ...}
        listed = self.get("artifacts", [])
        paths = [x.get("source") if isinstance(x, dict) else x for x in listed] if isinstance(listed, list) else [None]
        if not all(isinstance(x, str) and x.strip("/") for x in paths):
            self.wrong(f"artifacts = {listed!r}", "a list of paths inside is needed")
        return tuple(paths)


def refuse_unsupported(toml: Settings):
    """ValueError for what a task asks for and would not get."""
    box, schema = toml["environment"], str(toml.get("schema_version", "1"))     # `version` is also authors' own
    if not schema.startswith("1"): toml.wrong(f"schema_version = {schema}", "known is 1.x, leave the task out")
    for what, is_there in {
            "several steps": toml.get("steps"), "[environment] gpus": box.get("gpus"),
            "[environment] tpu": box.get("tpu"),
            **{f"[{x}] allowed_hosts": toml[x].get("allowed_hosts") for x in ("environment", "agent", "verifier")},
            "[environment] mcp_servers": box.get("mcp_servers"), "[environment] healthcheck": box.get("healthcheck"),
            f"[environment] os = {box.get('os')}": str(box.get("os", "linux")).lower() != "linux",
            "[verifier.environment]": toml["verifier"].get("environment"),
            "[verifier] environment_mode = separate": toml["verifier"].get("environment_mode") == "separate",
            "[[verifier.collect]]": toml["verifier"].get("collect")}.items():
        if is_there: toml.wrong(what, "this is not supported, leave the task out")
    if compose := sorted(toml.path.glob("environment/*compose.y*ml")):
        raise ValueError(f"task {toml.path}: {compose[0].name}: services beside the sandbox are not supported; leave "
                         "the task out, or remove the file where the Dockerfile alone will do")


def load_task(path: Path, id: str, base_images: dict, internet="refuse") -> Task:
    """internet: whether tasks that ask for access to it get it: on, off, refuse."""
    for name in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (path / name).is_file(): raise FileNotFoundError(f"task {path}: {name} is missing")
    toml = Settings(path)
    try: instruction = CANARY.sub("", (path / "instruction.md").read_text()).strip()
    except UnicodeDecodeError as e: raise ValueError(f"task {path}: instruction.md: {e}") from None
    refuse_unsupported(toml)
    box = toml["environment"]
    for key, is_right, needs in (
            ("allow_internet", lambda x: isinstance(x, bool), "true or false is needed"),
            ("workdir", lambda x: isinstance(x, str) and x.startswith("/"), "a path from / on is needed"),
            ("docker_image", lambda x: isinstance(x, str), "an image's name is needed")):
        if key in box and not is_right(box[key]): toml.wrong(f"[environment] {key} = {box[key]!r}", needs)
    allowed = "public" if box.get("allow_internet", internet == "on") else "no-network"     # Harbor's default is on
    modes = [toml[x]["network_mode"] for x in ("environment", "agent", "verifier") if "network_mode" in toml[x]]
    asked = modes[0] if modes and "allow_internet" not in box else box.get("network_mode", allowed)
    for section in ("environment", "agent", "verifier"):
        mode = toml[section].get("network_mode", asked)
        if mode not in ("public", "no-network") or mode != asked and internet != "off":
            toml.wrong(f"[{section}] network_mode = {mode!r}", "supported is public or no-network, one for the whole "
                       "task; leave it out")
    is_online = asked == "public"
    if is_online and internet == "refuse":
        raise ValueError(f"task {path}: it asks for internet access (allow_internet, network_mode): say --internet on "
                         "(a network of the run's own) or --internet off (the task runs without)")
    image, mode = box.get("docker_image") or "", toml["metadata"].get("verify", "")
    if mode not in ("", *VERIFY): toml.wrong(f"[metadata] verify = {mode!r}", f"one of {', '.join(VERIFY)} is needed")
    if not image and not (path / "environment" / "Dockerfile").is_file():
        raise FileNotFoundError(f"task {path}: environment/Dockerfile is missing, and task.toml names no docker_image")
    env = sandbox.environment(path, base_images, image)
    env = replace(env, workdir=box.get("workdir") or env.workdir, env=env.env | toml.variables("environment"),
                  internet=is_online and internet == "on",
                  build_timeout_s=toml.number("environment", "build_timeout_sec", 600))
    limits = {"memory_mb": toml.megabytes("memory", 2048), "cpus": toml.number("environment", "cpus", 1),
              "disk_mb": toml.megabytes("storage", 10240)}
    return Task(id, path, instruction, env, toml.number("agent", "timeout_sec", 600),
                toml.number("verifier", "timeout_sec", 600), limits, str(toml["metadata"].get("category") or id), mode,
                {s: str(toml[s].get("user", "")) for s in ("agent", "verifier")},
                {s: toml.variables(s) for s in ("verifier", "solution")},
                toml.artifacts(), toml.unread())


def load_tasks(root: str, base_images: dict = {}, internet="refuse", skip_refused=False) -> list:
    """All tasks below a folder (or the one that it is), by name. ValueError names all that are refused."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"--tasks {root}: no such folder; `python tasks/shell.py DIR` writes the shell tasks")
    paths = {p.parent for p in root.rglob("task.toml")}
    paths = sorted(p for p in paths if paths.isdisjoint(p.parents))     # what lies in a task is its own
    if old := next(root.rglob("task.yaml"), None) if not paths else None:
        raise ValueError(f"--tasks {root}: {old.relative_to(root)} is Terminal-Bench's older format; convert it with: "
                         f"pip install harbor && harbor tasks migrate -i {root} -o NEW_FOLDER")
    if not paths: raise FileNotFoundError(f"--tasks {root}: no task.toml below it, so no task in Harbor's format")
    tasks, refused = [], []
    for p in paths:
        try: tasks.append(load_task(p, str(Path(root.resolve().name) / p.relative_to(root)), base_images, internet))
        except (ValueError, FileNotFoundError) as e: refused.append(str(e) if str(p) in str(e) else f"task {p}: {e}")
    if refused and not (skip_refused and tasks):
        more = f"{len(refused)} of {len(paths)} tasks are refused; --skip_refused goes on without them"
        raise ValueError("\n".join([*refused, more] if len(paths) > 1 else refused))
    if refused: print(*refused, f"{len(refused)} of {len(paths)} tasks are left out", sep="\n", file=sys.stderr)
    for key in dict.fromkeys(key for task in tasks for key in task.unread):
        ids = [task.id for task in tasks if key in task.unread]
        print(f"warning: {key} in task.toml means nothing here: {len(ids)} tasks, first {ids[0]}", file=sys.stderr)
    return tasks


def script(file: Path, inside: str) -> list:
    """argv that runs a task's script as its first line says, else with bash."""
    with open(file, "rb") as f: first = f.readline().decode(errors="replace").strip()
    return [*(first[2:].split(None, 1) if first.startswith("#!") else ["bash"]), inside]


# --- one rollout ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    task: Task
    harness: str                        # a name in harnesses/, or oracle, or nop
    sample: int = 0                     # which of the group
    script: object = None               # texts for a scripted engine, or a function (proxy.Session)

    @property
    def id(self): return f"{self.task.id}.{self.harness}.{self.sample}"


def record_path(out: Path, job: Job) -> Path:
    """set/task.harness.0 -> set-task.harness.0.jsonl; with a hash where another id could give the same name."""
    id = job.task.id
    is_plain = re.fullmatch(r"[\w.]+(/[\w.-]+)?", id, re.A) and len(id) < 120
    mark = "" if is_plain else "-" + hashlib.sha256(id.encode()).hexdigest()[:8]
    return out / f"{re.sub(r'[^a-zA-Z0-9_.-]', '-', id)[:120]}{mark}.{job.harness}.{job.sample}.jsonl"


# What the agent may have put where the verifier reads or writes.
CLEAN = """for d in /tests /solution /logs; do
    [ -d $d ] && [ ! -L $d ] || rm -f $d; chmod -R u+rwX $d; find $d -mindepth 1 -delete; done
mkdir -p /tests /solution /logs/verifier /logs/agent /logs/artifacts; chmod 777 /logs/*"""

# Of two files with a reward the later counts: guards write 0 to reward.txt and the tests then reward.json; and code of
# the agent's that tests import writes one first and they the other. A time to come is made up. Status 1: reward.json;
# any other, as where processes that are left fill the limit: reward.txt.
LATER = """cd /logs/verifier; rm -f .now; touch .now
[ ! reward.txt -nt .now ] && { [ reward.txt -nt reward.json ] || [ reward.json -nt .now ]; }"""


def remember(file: Path, text: str):
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    part.write_text(text)
    part.replace(file)


class Runner:
    """What all rollouts of a run share. `proxy` may be None for oracle and nop."""

    def __init__(self, proxy, kind: str, run_id: str, *, model="", num_parallel=8, temperature=1.0, num_warm=2,
                 verify="auto", off=(), reward_weights=None, weights_id="", **options):
        """num_warm: sandboxes that wait, started, for their turn; verify: auto or one of VERIFY; off: some of DEFENCES;
        weights_id: goes on record; options: of each session (proxy.Session): max_tokens, max_calls,
        max_rollout_tokens, openclaw_stable."""
        self.proxy, self.kind, self.run_id, self.model, self.num_parallel = proxy, kind, run_id, model, num_parallel
        self.temperature, self.options, self.verify, self.off = temperature, options, verify, frozenset(off)
        self.num_warm, self.turns, self.reward_weights = num_warm, threading.Semaphore(num_parallel), reward_weights
        self.weights_id = weights_id
        self.is_stopping, self.boxes, self.without_git = threading.Event(), [], set()
        self.pool, self.futures, self.is_going, self.held = None, [], threading.Event(), (None, 0.)
        self.agents, self.stale = {}, set()             # log -> sandbox in which an agent runs; logs of those given up
        self.is_going.set()

    def modes(self, job: Job) -> tuple:
        """The verify modes to try until one gives reward 1."""
        if self.verify != "auto" or job.task.verify: return (job.task.verify if self.verify == "auto" else self.verify,)
        if job.harness == "oracle": return VERIFY
        file = job.task.mode_file(self.kind)
        found = file.read_text().strip() if file.exists() else ""
        return (found if found in VERIFY else "strict",)

    def run(self, job: Job, out: Path, replay=None) -> tree.Rollout:
        """One rollout, whatever becomes of it: the fault boundary. -> as read back from its record. replay: recorded
        calls that answer while prompts are equal."""
        record = record_path(out, job)
        log = record.with_suffix(".log")
        seconds, session, mode = {}, None, ""
        settings = {k: v for k, v in self.options.items() if k != "replay"} | {
            "off": sorted(self.off), "reward_weights": self.reward_weights}
        if job.harness not in WITHOUT_MODEL:
            settings |= {"graft": self.proxy.mode, "max_model_len": self.proxy.engine.model_config.max_model_len}
        header = {"task": job.task.id, "category": job.task.category, "harness": job.harness, "model": self.model,
                  "settings": settings, "weights_id": self.weights_id}
        first = {"id": job.id, **header, "temperature": self.temperature, "started_s": time.time()}
        try:
            out.mkdir(parents=True, exist_ok=True)
            for path in record, log: path.unlink(missing_ok=True)
            tree.append(record, {"type": "rollout", "format": 1, **first})      # a session begins it anew
            with contextlib.ExitStack() as stack:
                if job.harness not in WITHOUT_MODEL:
                    if self.proxy.engine.errored: raise sandbox.SandboxError(ENGINE_DEAD)
                    session = self.proxy.open_session(job.id, record, header, temperature=self.temperature,
                                                      script=job.script, **{"replay": replay} | self.options)
                    stack.callback(self.proxy.close_session, session)
                modes, found = self.modes(job), {}
                for mode in modes:
                    seconds.clear()
                    found[mode] = end = self.agent_and_verify(job, mode, session, log, seconds)
                    is_solved, proof = (end["reward"] or 0) >= 1, job.task.mode_file(self.kind, mode)
                    if job.harness == "oracle" and is_solved: remember(proof, str(seconds["verify"]))
                    elif job.harness == "oracle" and end["reward"] is not None: proof.unlink(missing_ok=True)
                    if is_solved: break
                else:                                       # none did: the first that came to a verdict
                    mode = next((m for m in modes if found[m]["reward"] is not None), modes[0])
                    end = found[mode]
                # the oracle looked for the strictest; a time limit says nothing of a mode
                if len(modes) > 1 and not any(x["outcome"] == "timeout" or x["detail"].startswith(OUT_OF_TIME)
                                              for x in found.values()):
                    remember(job.task.mode_file(self.kind), mode if (end["reward"] or 0) >= 1 else "strict")
            if session is not None and session.broken:
                raise sandbox.SandboxError(f"a call is not on record: {session.broken}")
        except Exception as e:
            if self.is_stopping.is_set(): raise             # the record stays without an end
            is_known = isinstance(e, (sandbox.SandboxError, OSError))
            end = {"outcome": "infra_error", "reward": None,
                   "detail": str(e) if is_known else traceback.format_exc(limit=-3)}
        if (session is not None and not session.calls
                and end["outcome"] in ("ok", "overlong", "harness_error", "timeout")):
            end |= {"outcome": "no_calls", "reward": None,
                    "detail": f"the harness never reached the model: {end['detail']}, see {log}"}
            print(f"warning: {job.id}: {end['detail']}", file=sys.stderr)
        for box in [x for x in self.boxes if x.thread == threading.get_ident()]: self.boxes.remove(box)
        end |= {"seconds": seconds, "sandbox": self.kind, "verify": mode}
        if session is not None and session.diverged: end["replay_diverged"] = session.diverged
        try:
            tree.append(record, {"type": "end"} | end)
            return tree.read(record)
        except (OSError, ValueError) as e:                  # the disk is full: the record stays without an end
            print(f"warning: {job.id}: {e}", file=sys.stderr)
            known = {k: first[k] for k in ("id", "task", "harness", "model", "temperature", "started_s")}
            return tree.Rollout(**known, outcome="infra_error", detail=str(e), seconds=seconds)

    def make(self, job: Job, stage: str, env=None, memory_mb=0, **kw):
        """A sandbox, not started; memory_mb: on top of the task's limit."""
        limits = job.task.limits | {"memory_mb": job.task.limits["memory_mb"] + memory_mb}
        box = sandbox.SANDBOXES[self.kind](env or job.task.env, run_id=self.run_id, name=f"{job.id}.{stage}", **limits,
                                           **kw)
        box.thread = threading.get_ident()                  # a rollout has one of its own
        self.boxes.append(box)
        self.is_going.wait()
        if self.is_stopping.is_set(): raise sandbox.SandboxError("the run is stopping")
        return box

    def agent_and_verify(self, job: Job, mode: str, session, log: Path, seconds: dict) -> dict:
        """-> outcome, reward, detail and what else the record's end tells; fills seconds by stage."""
        task, lap = job.task, self.clock()
        harness = harnesses.load(job.harness) if session else None

        def took(stage):
            nonlocal lap
            seconds[stage], lap = round(self.clock() - lap, 4), self.clock()

        with self.make(job, "agent", memory_mb=harness.memory_mb if harness else 0,
                       runtimes=harness.mounts() if harness else {},
                       socket=session.address if session else None) as box, contextlib.ExitStack() as stack:
            if mode != "history" and "git" not in self.off and task.path not in self.without_git:
                if not box.squash(): self.without_git.add(task.path)
            if mode == "strict" and box.workdir == "/":
                return {"outcome": "verifier_error", "reward": None, "detail":
                        "the image has no WORKDIR, so no workspace to carry over: give it one, or say --verify compat"}
            own_tests = stack.enter_context(tempfile.TemporaryDirectory())      # the image's, before an agent comes
            if mode != "strict":
                with contextlib.suppress(FileNotFoundError, ValueError): box.get("/tests", own_tests)
            took("start")
            stack.enter_context(self.turns)
            self.is_going.wait()
            lap = self.clock()
            result = self.run_agent(job, harness, session, box, log)
            if result is None: return {"outcome": "stale", "reward": None, "detail": "sampled by weights too old"}
            outcome, more = outcome_of(result, harness, session), {"exit_code": result.exit_code}
            took("agent")
            box.freeze()                                    # from here on nothing that the agent started runs
            if "tamper" not in self.off and (paths := box.changed()):
                more["tamper"] = {"num": len(paths), "paths": paths[:20]}
            shutil.rmtree(log.with_suffix(".artifacts"), ignore_errors=True)
            for path in task.artifacts:
                kept = log.with_suffix(".artifacts") / path.strip("/").replace("/", "-")
                kept.parent.mkdir(exist_ok=True)
                try: box.get(path, kept)
                except FileNotFoundError: pass
                except ValueError as e:                     # too large, or what must not reach the host
                    more.setdefault("artifacts", []).append(str(e))
                    shutil.rmtree(kept) if kept.is_dir() else kept.unlink(missing_ok=True)
            fresh, problem = self.verifier(job, box, mode, stack, more, own_tests)
            if problem:
                problem = f"the workspace cannot be carried over: {problem}"
                return {"outcome": outcome, "reward": 0., "detail": problem} | more
            more["verifier_at"] = log.stat().st_size + 1 if log.exists() else 1
            reward, call_rewards, named, problem = self.run_tests(job, session, fresh, log)
            took("verify")
        if named: more["rewards"] = named
        if problem:                                         # no way out of a 0
            is_agent_s = reward == 0 and session and self.is_proven(task, mode, problem.startswith(OUT_OF_TIME))
            reward = 0. if outcome == "overlong" or is_agent_s else None
            return {"outcome": "verifier_error", "reward": reward, "detail": problem} | more
        how = f"exit status {result.exit_code}"
        if result.is_over_disk: how = f"wrote more than {task.limits['disk_mb']} MB"
        detail = "" if outcome == "ok" else f"{how}, the verifier gave {reward:g}"
        if outcome == "overlong": reward, call_rewards = 0., None
        if outcome == "harness_error" and session and session.refused: detail += f", last answer {session.refused}"
        return {"outcome": outcome, "reward": reward, "call_rewards": call_rewards, "detail": detail} | more

    def is_proven(self, task: Task, mode: str, is_out_of_time: bool) -> bool:
        """Has the oracle shown that the verifier works, and that it has time enough on a machine however busy?"""
        proof = task.mode_file(self.kind, mode)
        return proof.exists() and (not is_out_of_time
                                   or float(proof.read_text() or "inf") < task.verifier_timeout_s / 10)

    def run_agent(self, job: Job, harness, session, box, log: Path):
        """The agent, to its end and that of its session -> sandbox.Result, or None: it was given up."""
        task = job.task
        if job.harness == "oracle":
            box.put(task.path / "solution", "/solution")
            argv = script(task.path / "solution/solve.sh", "/solution/solve.sh")
            env = task.envs.get("solution", {})
        elif job.harness == "nop": argv, env = ["true"], {}
        else:
            context_tokens = self.proxy.engine.model_config.max_model_len
            argv, env = harness.argv, harness.env | {"INSTRUCTION": task.instruction,
                                                     "CONTEXT_TOKENS": str(context_tokens)}
        # a harness that does not take its last no for an answer (some ask again for minutes) is ended, too
        timer = threading.Timer(SPENT_S, box.kill)
        timer.daemon = True
        if session: session.when_spent = timer.start
        self.agents[log] = box
        try:
            if log not in self.stale:
                result = box.exec(argv, env=env, timeout_s=task.agent_timeout_s, log=log, clock=self.clock,
                                  user=task.users.get("agent", ""))
        finally:
            del self.agents[log]
            timer.cancel()
        if timer.is_alive(): timer.join()
        if session: self.proxy.end_session(session)
        if log in self.stale: return None
        if session and self.proxy.engine.errored:
            raise sandbox.SandboxError(ENGINE_DEAD)
        if session and ((session.refused or "").startswith("status 5") or      # 4xx: the request's own fault
                        session.calls and session.calls[-1].finish == "error"):
            raise sandbox.SandboxError(f"the engine failed in the last call: {session.refused or 'it broke off'}")
        return result

    def verifier(self, job: Job, box, mode: str, stack, more: dict, own_tests) -> tuple:
        """-> (the sandbox to verify in, None), and the agent's is removed; or (_, what the agent did against it)."""
        if mode == "strict":
            fresh = stack.enter_context(self.make(job, "verify"))
            try: left_out = box.carry(fresh.workdir, fresh, self.off, job.task.envs.get("verifier"))
            except (FileNotFoundError, ValueError) as e: return fresh, e
            if left_out: more |= {"left_out": left_out[:20], "num_left_out": len(left_out)}
        else:
            try: fresh, code = self.heir(job, box, stack)
            except sandbox.SandboxError:
                if self.kind != "docker": raise
                box.freeze()                                # raises where it is gone, the next line where Docker is
                with self.make(job, "probe") as probe, probe.snapshot(): probe.exec(["true"])
                try: fresh, code = self.heir(job, box, stack)
                except sandbox.SandboxError as e:           # no shell, a file in a folder's place, ...
                    if self.is_stopping.is_set() or NOT_THE_AGENT_S.search(str(e)): raise
                    return None, e
            if code: return fresh, "/tests, /solution and /logs cannot be emptied of what the agent left there"
            if os.listdir(own_tests): fresh.put(own_tests, "/tests")
        box.stop()
        fresh.disk_mb += min(fresh.disk_mb, fresh._used_bytes() >> 20)      # the tests have room of their own
        return fresh, None

    def heir(self, job: Job, box, stack) -> tuple:
        """-> a sandbox of all that the agent left but what is in the verifier's way, exit status of that cleaning."""
        env = stack.enter_context(box.snapshot(is_last=True))
        fresh = stack.enter_context(self.make(job, "verify", env))
        return fresh, fresh.exec(["sh", "-c", CLEAN], user="root", timeout_s=600).exit_code

    def run_tests(self, job: Job, session, box, log: Path) -> tuple:
        """Runs the task's tests -> what read_reward tells"""
        box.put(job.task.path / "tests", "/tests")
        if session:                                         # what was sampled, for a verifier that pays by call
            rows = [{"id": c.id, "kind": c.kind, "finish": c.finish, "text": self.proxy.tokenizer.decode(
                list(c.sampled_ids))} for c in sorted(session.calls, key=lambda c: c.id)]
            with tempfile.TemporaryDirectory() as tmp:
                (Path(tmp) / "calls.json").write_text(json.dumps(rows))
                box.put(tmp, "/logs/agent")
        with open(log, "a") as f: f.write("\n=== verifier\n")
        task = job.task
        verdict = box.exec(script(task.path / "tests/test.sh", "/tests/test.sh"), timeout_s=task.verifier_timeout_s,
                           log=log, env=task.envs.get("verifier"), user=task.users.get("verifier", ""),
                           clock=self.clock)
        return read_reward(box, verdict, len(session.seen) if session else 0, self.reward_weights)

    def run_all(self, jobs: list, out: Path, what: str, quiet=False) -> list:
        """Rollouts of all jobs, in their order; a progress bar. Ctrl-C or a fault ends what runs, sandboxes first."""
        try:
            futures = self.begin(jobs, out)
            bar = tqdm(concurrent.futures.as_completed(futures), total=len(jobs), desc=what, disable=quiet or None,
                       leave=False)
            for future in bar: future.result()
            return [future.result() for future in futures]
        finally: self.stop()

    # --- rollouts that may outlive an update of the weights (train.py --carry_over)
    def begin(self, jobs: list, out: Path, replays=None) -> list:
        """Futures of the jobs' rollouts, begun in their order after all earlier ones; replays: of each, see `run`."""
        self.pool = self.pool or concurrent.futures.ThreadPoolExecutor(self.num_parallel + self.num_warm)
        self.futures = [future for future in self.futures if not future.done()]
        num_earlier = len(self.futures)
        for job, replay in zip(jobs, replays or [None] * len(jobs)):
            self.futures.append(self.pool.submit(self.run, job, out, replay))
        return self.futures[num_earlier:]

    def hold(self):
        """Until `go_on` no sandbox and no agent starts, and no time limit comes nearer; with the engine asleep,
        an agent goes on to its next call, a verifier to its end. None is frozen: clocks inside would run on, and each
        command that a harness had timed would be over its limit at the thaw."""
        self.is_going.clear()
        self.held = time.monotonic(), self.held[1]

    def go_on(self):
        begin, held_s = self.held
        self.held = None, held_s + time.monotonic() - begin
        self.is_going.set()

    def clock(self) -> float:
        """Seconds, without those of holds."""
        begin, held_s = self.held
        return (begin or time.monotonic()) - held_s

    def give_up(self, jobs: list, out: Path, futures: list):
        """These rollouts end now, as `stale` where their agents had not ended."""
        logs = {record_path(out, job).with_suffix(".log") for job in jobs}
        self.stale |= logs
        while concurrent.futures.wait(futures, 0.2).not_done:
            for box in filter(None, map(self.agents.get, logs)):
                with contextlib.suppress(sandbox.SandboxError): box.kill()

    def stop(self):
        """Ends what runs, sandboxes first; its records stay without an end. Nothing where all rollouts have ended."""
        if any(not future.done() for future in self.futures):
            self.is_stopping.set(), self.is_going.set()
            self.pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in self.futures):    # one just made may start after a stop
                for box in list(self.boxes):
                    with contextlib.suppress(sandbox.SandboxError): box.stop()
                time.sleep(0.05)
        if self.pool: self.pool.shutdown()
        self.pool = None


def outcome_of(result, harness, session) -> str:
    """ok, overlong, timeout or harness_error, of the agent alone; no session: an agent that needs no model."""
    if session and session.is_spent: return "overlong"
    if result.timed_out: return "timeout"
    if harness and result.exit_code == harness.overlong_exit: return "overlong"
    if session and session.refused: return "harness_error"                     # some end with 0 after failing
    has_ended = result.exit_code == 0 or session and session.has_final_answer()     # or with 1 after a final answer
    return "ok" if has_ended else "harness_error"


def pay_calls(text: str, num_calls: int) -> list | None:
    """The calls' rewards by id, out of reward.json; None = it pays none, or there was no model. ValueError: what is
    wrong with them."""
    paid, by_id = {k: x for k, x in json.loads(text).items() if k.startswith("call_")}, [0.] * num_calls
    if not paid or not num_calls: return None
    ids = {f"call_{i}": i for i in range(num_calls)}
    for key, x in paid.items():
        if key not in ids: raise ValueError(f"paid {key}; the rollout has {num_calls} calls, from call_0 on")
        if type(x) not in (int, float) or not abs(x) < MAX_REWARD:
            raise ValueError(f"paid {key} {str(x)[:80]!r}; a number within ±{MAX_REWARD:g} is needed")
        by_id[ids[key]] = float(x)
    return by_id


def parse_reward(text: str, is_json: bool, weights: dict | None) -> tuple:
    """-> (reward, {name: reward}). Of several: `weights` (their sum, weighted), else the one named reward."""
    if not is_json: return float(text), {}
    named = {k: float(v) for k, v in json.loads(text).items()
             if isinstance(v, (int, float)) and not k.startswith("call_")}
    return math.fsum(w * named[k] for k, w in (weights or {"reward": 1.}).items()), named


def read_reward(box, verdict, num_calls: int, weights: dict | None) -> tuple:
    """-> (reward, the calls' rewards by id or None, {name: reward}, None) or (0 where what the agent left may be the
    cause, else None; None, {}, what is wrong)"""
    with tempfile.TemporaryDirectory() as tmp:
        problem, files = None, [Path(tmp) / name for name in ("reward.json", "reward.txt")]
        for file in files:
            with contextlib.suppress(FileNotFoundError, ValueError): box.get(f"/logs/verifier/{file.name}", file)
        files = [file for file in files if file.is_file()]  # no folder
        if len(files) > 1 and box.exec(["sh", "-c", LATER], user="root", timeout_s=60).exit_code != 1: files.reverse()
        for file in files:
            name = file.name
            text = file.read_text(errors="replace")[:100_000]
            needs = f"a number within ±{MAX_REWARD:g} is needed"
            try: reward, named = parse_reward(text, name == "reward.json", weights)
            except KeyError as e:                           # it may tell other things, and reward.txt the reward
                problem = (f"tests/test.sh wrote {text.strip()[:80]!r} to {name}; there is no {e}, name what counts: "
                           "--reward_weights NAME=WEIGHT,...")
                if weights: break
                continue
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError): reward = math.nan
            if not abs(reward) < MAX_REWARD:
                return 0., None, {}, f"tests/test.sh wrote {text.strip()[:80]!r} to {name}; {needs}"
            try: return reward, pay_calls(text, num_calls) if name == "reward.json" else None, named, None
            except ValueError as e: return None, None, {}, f"tests/test.sh {e}"
    if problem: return None, None, {}, problem
    how = OUT_OF_TIME if verdict.timed_out else f"tests/test.sh ended with status {verdict.exit_code}"
    is_killed = verdict.exit_code == 137 and not (verdict.timed_out or verdict.is_over_disk)
    return (None if is_killed else 0., None, {},
            f"{how} and wrote no /logs/verifier/reward.txt: {verdict.output.strip()[-200:]}")


# --- what came of many ------------------------------------------------------------------------------------------------
def wilson(k: float, n: int, z=1.96) -> tuple:
    """95 % interval of a rate of k in n (Wilson, 1927)."""
    if n == 0: return math.nan, math.nan
    p, d = k / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    return max(0., (p + z * z / (2 * n)) / d - half), min(1., (p + z * z / (2 * n)) / d + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k samples of a task solves it, unbiased, from c solved of n (2107.03374)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def rate(counts: list, k=1) -> tuple:
    """pass@k over tasks and its 95 % interval; counts: (judged, solved) of each; those with fewer than k are left out.
    A task is a cluster: Wilson's interval, for as many independent samples as the spread over the tasks is worth
    (Kish's design effect; at least one a task). Of a single task: for that task alone, over its samples."""
    counts = [(n, c) for n, c in counts if n >= k]
    if not counts: return math.nan, math.nan, math.nan
    values = [pass_at_k(n, c, k) for n, c in counts]
    p, num, most = fmean(values), len(counts), sum(n // k for n, _ in counts)
    spread = variance(values) if num > 1 else 0.
    size = most if num == 1 else num if p in (0., 1.) else min(most, max(num, p * (1 - p) * num / max(spread, 1e-9)))
    return p, *wilson(p * size, size)


def counts_of(rollouts: list) -> dict:
    """task -> (judged, solved); tasks that nothing judged are left out."""
    judged = [r for r in rollouts if r.reward is not None]
    num, solved = Counter(r.task for r in judged), Counter(r.task for r in judged if r.reward >= 1)
    return {task: (n, solved[task]) for task, n in num.items()}


def summary(rollouts: list) -> dict:
    """pass_rate (pass@1) and pass@2, @4, ... over tasks with intervals, from the rollouts that have a reward (solved:
    reward >= 1), and the outcomes."""
    counts = list(counts_of(rollouts).values())
    pass_rate, low, high = rate(counts)
    s = {"num": len(rollouts), "num_tasks": len(counts), "num_judged": sum(n for n, _ in counts),
         "solved": sum(c for _, c in counts), "pass_rate": pass_rate, "low": low, "high": high}
    for k in (2**i for i in range(1, max([n for n, _ in counts], default=0).bit_length())):
        s |= zip((f"pass@{k}", f"pass@{k}_low", f"pass@{k}_high"), rate(counts, k))
    return s | {"outcomes": dict(Counter(r.outcome for r in rollouts))}


def show(s: dict) -> str:
    outcomes = ", ".join(f"{k} {v}" for k, v in sorted(s["outcomes"].items()))
    if not s["num_judged"]: return f"none of {s['num']} rollouts has a reward; {outcomes}"
    more = "".join(f"{k} {100 * v:.1f} %; " for k, v in s.items() if re.fullmatch(r"pass@\d+", k))
    return (f"{100 * s['pass_rate']:.1f} % of {s['num_judged']} solved "
            f"(95 %: {100 * s['low']:.1f} to {100 * s['high']:.1f}); {more}{outcomes}")


def sign_flip_p(d) -> float:
    """Two-sided p of a mean of paired differences d (T,), were each sign a coin's: exact up to 16 that are not 0 (with
    one sample a task, McNemar's exact test), else from 20,000 draws, always the same."""
    d = d[d != 0]
    extreme = lambda signs: int((abs(signs @ d) >= abs(d.sum()) - 1e-9).sum())
    if len(d) <= 16: return sum(extreme(np.array(s)) for s in product((-1., 1.), repeat=len(d))) / 2**len(d)
    coin = np.random.default_rng(0)
    return (1 + sum(extreme(coin.choice((-1., 1.), (500, len(d)))) for _ in range(40))) / 20_001


def newcombe(a: tuple, b: tuple, r=0.) -> dict:
    """Of b - a, each (rate, low, high), r their correlation: Newcombe, 1998, method 8."""
    (p, p_low, p_high), (q, q_low, q_high) = a, b
    d, half = q - p, lambda s, t: math.sqrt(max(0., s * s + t * t - 2 * r * s * t))
    return {"difference": d, "low": d - half(q - q_low, p_high - p), "high": d + half(q_high - q, p - p_low)}


def compare(a: dict, b: dict, k=1) -> dict:
    """a, b: task -> (judged, solved). Paired over the tasks with k samples in both: pass@k of each, difference b - a,
    95 % interval (newcombe, with the tasks' correlation), p (sign_flip_p)."""
    tasks = [t for t in a if t in b and min(a[t][0], b[t][0]) >= k]
    p, q = (rate([x[t] for t in tasks], k) for x in (a, b))
    x, y = (np.array([pass_at_k(*c[t], k) for t in tasks]) for c in (a, b))
    r = np.corrcoef(x, y)[0, 1] if len(tasks) > 1 and np.ptp(x) and np.ptp(y) else 0.
    return {"k": k, "num_tasks": len(tasks), "a": p[0], "b": q[0]} | newcombe(p, q, r) | {"p": sign_flip_p(y - x)}


def read_folder(folder: str) -> list:
    """Rollouts of a folder of records; of a run of train.py, those of its last evaluation."""
    root = Path(folder)
    if (root / "metrics.jsonl").is_file():
        order = lambda p: (p.name == "eval-end", [int(n) for n in re.findall(r"\d+", p.name)], p.name)
        root = max(root.glob("rollouts/eval-*"), key=order, default=root / "rollouts" / "eval-*")
    rollouts = [tree.read(path) for path in tree.records(root)]
    if not rollouts: raise FileNotFoundError(f"{root}: no records; name an --out of rollout.py or train.py")
    return rollouts


def compare_folders(args):
    a, b = map(read_folder, args.folders)
    names, rows = sorted({r.harness for r in a} & {r.harness for r in b}), []
    for name in names + ["all"] * (len(names) > 1):
        one, two = (counts_of([r for r in x if r.harness in (names if name == "all" else [name])]) for x in (a, b))
        smallest = min((min(one[t][0], two[t][0]) for t in one if t in two), default=0)
        rows += [{"harness": name, "left_out": len(one.keys() ^ two.keys())} | compare(one, two, k)
                 for k in sorted({1, smallest if name != "all" else 1}) if smallest]
    if not rows: raise ValueError(f"{args.folders[0]} and {args.folders[1]}: no task that both judged with one harness")
    told = [[{"temperature": r.temperature, "verify": r.verify} | r.more.get("settings", {})
             for r in x if r.harness in names] for x in (a, b)]
    for name in sorted(set().union(*told[0]) & set().union(*told[1])):      # what one folder lacks is not known
        one, two = ("/".join(sorted({json.dumps(s.get(name)) for s in x})) for x in told)
        if one != two: print(f"warning: {name} was {one} in A, {two} in B: not the same test", file=sys.stderr)
    if args.json: return print(json.dumps(rows))
    for r in rows:
        p, q, d, low, high = (100 * r[k] for k in ("a", "b", "difference", "low", "high"))
        print(f"{r['harness']}, pass@{r['k']}, {r['num_tasks']} tasks: A {p:.1f} %, B {q:.1f} %, B - A {d:+.1f} points "
              f"(95 %: {low:+.1f} to {high:+.1f}), p {r['p']:.2g}; {r['left_out']} tasks in one folder alone")


# --- the command ------------------------------------------------------------------------------------------------------
def command(main, args):
    """Runs a command: bad input is one line and exit status 2, Ctrl-C and a termination end it with 130."""
    def terminate(*_): raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, terminate)
    try: status = main(args) or 0
    except (ValueError, OSError, AssertionError, sandbox.SandboxError) as e:
        where = traceback.extract_tb(e.__traceback__)[-1].filename
        if "/lib/python" in where and not isinstance(e, OSError): traceback.print_exc()     # no check of ours
        print(f"error: {e or type(e).__name__}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BaseException:               # whatever it is: without os._exit the process might stay
        traceback.print_exc()
        status = 1
    for child in multiprocessing.active_children(): child.kill()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)                    # vLLM's threads may outlive the engine


def parse_reward_weights(text: str) -> dict | None:
    """a=1,b=0.5 -> {a: 1.0, b: 0.5}; None for nothing."""
    try: return {k: float(v) for k, v in (pair.split("=") for pair in text.split(","))} if text else None
    except ValueError: raise ValueError(f"--reward_weights {text}: NAME=WEIGHT,... is needed") from None


def base_images(pairs: list) -> dict:
    for pair in pairs:
        if not all(pair.partition("=")[::2]): raise ValueError(f"--base_image {pair}: NAME=LOCAL is needed")
    return dict(pair.split("=", 1) for pair in pairs)


def parse(argv=None):
    p = argparse.ArgumentParser(description="Evaluates and records without training.", allow_abbrev=False)
    p.add_argument("--tasks", required=True, help="folder of tasks in Harbor's format")
    p.add_argument("--harness", default="",
                   help=f"one of {', '.join(harnesses.names())}, oracle, nop; several with commas")
    p.add_argument("--out", default="", help="folder for the records")
    p.add_argument("--prebuild", action="store_true", help="only build or pull the tasks' images")
    p.add_argument("--model", default="smollm2", help="Hugging Face folder, or smollm2 (default %(default)s)")
    p.add_argument("--n", type=int, default=1, help="rollouts a task and harness (default %(default)s)")
    p.add_argument("--limit", type=int, default=0, help="only the first so many tasks (0 = all)")
    p.add_argument("--engine", choices=("vllm", "scripted"), default="vllm", help="default %(default)s")
    p.add_argument("--script",
                   help="with --engine scripted: a file, one line = one reply; or 'solution' for each task's own")
    p.add_argument("--sandbox", choices=("auto", "docker", "bubblewrap"), default="auto",
                   help="auto: Docker where a daemon answers, else bubblewrap")
    p.add_argument("--base_image", action="append", default=[], metavar="NAME=LOCAL",
                   help="local image in an image's place")
    p.add_argument("--num_parallel", type=int, default=8, help="rollouts at once (default %(default)s)")
    p.add_argument("--num_warm", type=int, default=2,
                   help="sandboxes that wait, started, for their turn (default %(default)s)")
    p.add_argument("--verify", choices=("auto", *VERIFY), default="auto", help="auto: see the file's beginning")
    p.add_argument("--off", default="", help=f"defences to leave out, with commas: {', '.join(DEFENCES)}")
    p.add_argument("--internet", choices=("refuse", "off", "on"), default="refuse",
                   help="for tasks that ask for internet access; on: also for those that say nothing of it")
    p.add_argument("--skip_refused", action="store_true", help="go on without the tasks that are refused")
    p.add_argument("--reward_weights", default="", metavar="NAME=WEIGHT,...", help="of several rewards")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling (default %(default)s)")
    p.add_argument("--max_model_len", type=int, default=2048, help="context, tokens (default %(default)s)")
    p.add_argument("--max_tokens", type=int, default=0, help="cap of a reply, tokens (0 = what fits)")
    p.add_argument("--max_calls", type=int, default=0, help="calls of a rollout, then it is overlong (0 = no limit)")
    p.add_argument("--max_rollout_tokens", type=int, default=0, help="sampled tokens of a rollout (0 = no limit)")
    p.add_argument("--graft", choices=graft.GRAFTS, default="canonical",
                   help="when a reply that comes back becomes its sampled ids (default %(default)s)")
    p.add_argument("--openclaw_stable", action="store_true", help="keep OpenClaw's last message where it once stood")
    p.add_argument("--engine_args", default="", help="further arguments of `vllm serve`, separated by spaces")
    if (sys.argv[1:] if argv is None else argv)[:1] == ["compare"]:
        p = argparse.ArgumentParser(description="pass@k of two folders, paired by task: difference, interval, p.")
        p.add_argument("compare")
        p.add_argument("folders", nargs=2, metavar="DIR", help="an --out of rollout.py or train.py, or a folder in it")
        p.add_argument("--json", action="store_true", help="one JSON list in place of text")
        return p.parse_args(argv)
    args = p.parse_args(argv)
    if (args.engine == "scripted") != (args.script is not None): p.error("--engine scripted and --script go together")
    args.off = [name for name in args.off.split(",") if name]
    if set(args.off) - set(DEFENCES): p.error(f"--off {','.join(args.off)}: some of {', '.join(DEFENCES)}")
    try: args.reward_weights = parse_reward_weights(args.reward_weights)
    except ValueError as e: p.error(str(e))
    if not args.prebuild and not (args.harness and args.out): p.error("--harness and --out are needed")
    if args.n < 1 or args.num_parallel < 1: p.error(f"--n {args.n} and --num_parallel {args.num_parallel}: at least 1")
    if not 0 <= args.temperature <= 10: p.error(f"--temperature {args.temperature}: from 0 (greedy) to 10")
    return args


def make_jobs(tasks, names, n, script=None) -> list:
    """script: None, 'solution', or a file whose lines every session gets."""
    lines = None
    if script and script != "solution":
        if not Path(script).is_file():
            raise FileNotFoundError(f"--script {script}: no such file; give one with a reply a line, or 'solution'")
        lines = Path(script).read_text().splitlines()

    def texts(task, name):
        if script is None or name in WITHOUT_MODEL: return None
        if lines is not None: return lines
        demonstrate = harnesses.load(name).demonstrate
        if demonstrate is None: raise ValueError(f"--harness {name}: it has no demonstrations; give --script a file")
        return demonstrate(task.solution())
    is_solved = lambda t: (t.path / "solution/solve.sh").is_file()
    needs_one = lambda h: h == "oracle" or h != "nop" and script == "solution"
    if any(map(needs_one, names)) and (bad := [t.id for t in tasks if not is_solved(t)]):
        if len(bad) == len(tasks): raise FileNotFoundError("no task has a solution/solve.sh, which is to be run")
        print(f"warning: left out, as they have no solution/solve.sh: {', '.join(bad)}", file=sys.stderr)
    return [Job(t, h, i, texts(t, h)) for t in tasks for h in names for i in range(n)
            if not needs_one(h) or is_solved(t)]


def prebuild(tasks: list, num_parallel: int) -> int:
    """Every image once, in parallel -> exit status."""
    envs = {(t.env.base, str(t.env.dockerfile)): t.env for t in tasks}
    with concurrent.futures.ThreadPoolExecutor(num_parallel) as pool:
        futures = [pool.submit(sandbox.image, env) for env in envs.values()]
        list(tqdm(concurrent.futures.as_completed(futures), total=len(futures), desc="images", disable=None))
    problems = [str(future.exception()) for future in futures if future.exception()]
    print(f"{len(futures) - len(problems)} of {len(futures)} images are ready", *problems, sep="\n  ")
    return 1 if problems else 0


def run_on_engines(runner, make_proxy, jobs: list, out: Path, what: str) -> list:
    """Rollouts of all jobs; what vLLM's engine leaves undone when it dies is run by another one, while that helps."""
    done, num_lost = runner.run_all(jobs, out, what), math.inf
    is_lost = lambda r: r.outcome == "infra_error"
    while runner.proxy and runner.proxy.engine.errored and 0 < (num := sum(map(is_lost, done))) <= num_lost / 2:
        print(f"vLLM's engine died; another one takes over, {num} rollouts are run again", file=sys.stderr)
        runner.proxy.close()
        runner.proxy, num_lost = None, num
        try: runner.proxy = make_proxy()
        except (RuntimeError, OSError) as e:                # memory is not free yet, ...: what is done still counts
            print(f"it does not start: {e}", file=sys.stderr)
            break
        again = iter(runner.run_all([job for job, r in zip(jobs, done) if is_lost(r)], out, what))
        done = [next(again) if is_lost(r) else r for r in done]
    return done


def main(args):
    if "compare" in args: return compare_folders(args)
    kind = sandbox.choose("docker" if args.prebuild else args.sandbox)
    tasks = load_tasks(args.tasks, base_images(args.base_image), args.internet,
                       args.skip_refused)[:args.limit or None]
    if args.prebuild: return prebuild(tasks, args.num_parallel)
    names = list(dict.fromkeys(args.harness.split(",")))
    for name in names:
        if name not in WITHOUT_MODEL: harnesses.load(name).mounts()     # builds the runtimes
    online = sum(task.env.internet for task in tasks)
    if online: print(f"warning: {online} tasks have internet access", file=sys.stderr)
    jobs = sorted(make_jobs(tasks, names, args.n, args.script), key=lambda job: job.harness != "oracle")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise NotADirectoryError(f"--out {args.out}: it is a file; name a folder")
    for record in (record_path(Path(args.out), job) for job in jobs):
        if record.exists():
            raise FileExistsError(f"--out {args.out}: {record.name} is there already; name another folder or remove it")
    sandbox.reap()
    run_id = uuid.uuid4().hex[:12]
    runner = Runner(None, kind, run_id, model=args.model, num_parallel=args.num_parallel,
                    num_warm=args.num_warm, verify=args.verify, off=args.off, reward_weights=args.reward_weights,
                    temperature=args.temperature, max_tokens=args.max_tokens, max_calls=args.max_calls,
                    max_rollout_tokens=args.max_rollout_tokens, openclaw_stable=args.openclaw_stable)
    try:
        make_proxy = None
        if set(names) - set(WITHOUT_MODEL):
            model = boundary.resolve_model(args.model, args.max_model_len)
            make_proxy = functools.partial(
                boundary.Proxy, model, max_model_len=args.max_model_len, engine=args.engine, graft=args.graft,
                engine_args=shlex.split(args.engine_args))
            runner.proxy = make_proxy()
        rollouts = []                                       # the oracle first: it finds how the others are verified
        for is_oracle, part in groupby(jobs, key=lambda job: job.harness == "oracle"):
            what = "oracle" if is_oracle else ",".join(n for n in names if n != "oracle")
            rollouts += run_on_engines(runner, make_proxy, list(part), Path(args.out), f"{what} in {kind}")
    finally:
        if runner.proxy is not None: runner.proxy.close()
        sandbox.reap(run_id)
    status = int(any(ENGINE_DEAD in r.detail for r in rollouts))
    for name in names:
        mine = [(job, r) for job, r in zip(jobs, rollouts) if r.harness == name]
        s = summary([r for _, r in mine])
        print(f"{name} in {kind}: {show(s)}")
        modes = Counter(r.verify for _, r in mine)
        if set(modes) - {"strict", ""}: print(f"  verified {', '.join(f'{k}: {v}' for k, v in sorted(modes.items()))}")
        wrong = [(job, r) for job, r in mine if r.outcome != "ok" or name == "oracle" and r.reward < 1
                 or name == "nop" and r.reward > 0]
        if wrong and name in WITHOUT_MODEL or not s["num_judged"]: status = 1
        width = max((len(r.task) for _, r in wrong), default=0)
        for job, r in wrong[:None if name in WITHOUT_MODEL else 20]:
            why = " ".join(r.detail.split())[:300] or last_words(record_path(Path(args.out), job), r)
            print(f"  {r.task:{width}}  {r.outcome:14} reward {r.reward}  {why}")
        if wrong: print(f"  what agents and verifiers printed: {args.out}/*.log")
        (Path(args.out) / f"summary.{name}.json").write_text(json.dumps(s))
    return status


def last_words(record: Path, rollout: tree.Rollout) -> str:
    """Of the verifier, where one ran, from the log beside a record."""
    if (at := rollout.more.get("verifier_at")) is None: return ""
    text = record.with_suffix(".log").read_bytes()[at:].decode(errors="replace")
    return " ".join(text.removeprefix("=== verifier").split())[-200:]


if __name__ == "__main__": command(main, parse())

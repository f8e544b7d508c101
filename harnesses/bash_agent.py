"""The smallest agent: asks for one bash command, runs it, shows the output, until DONE. A black box inside a sandbox.

Environment: INSTRUCTION; OPENAI_BASE_URL (http only, default http://127.0.0.1:8000/v1); MAX_TURNS (4); MAX_TOKENS of a
reply (128); COMMAND_TIMEOUT_S (10). A reply goes into the history exactly as received; what is run is the inside of its
``` fence, if it has one. Prints a transcript. Exits 0 on DONE, 4 after MAX_TURNS replies without it, 3 when the API
refuses (any 4xx, at once: a closed session, a full context) or stays broken (5 tries in 3 s); the transcript ends with
the status.
"""
import json, os, re, select, signal, socket, subprocess, sys, time      # http.client would cost 20 ms of CPU a start

SYSTEM = "You work in a Linux shell. Reply with one bash command and nothing else. When the task is done, reply DONE."
# kept from the commands
OWN = ("INSTRUCTION", "CONTEXT_TOKENS", "OPENAI_BASE_URL", "MAX_TURNS", "MAX_TOKENS", "COMMAND_TIMEOUT_S")
SHOWN_CHARS = 600


def post(url: str, body: dict) -> tuple[int, bytes]:
    """One HTTP request -> status, body. No time limit: a policy that is being updated answers late."""
    host, _, path = url.removeprefix("http://").partition("/")
    data = json.dumps(body).encode()
    head = (f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer none\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n")
    with socket.create_connection((host.partition(":")[0], int(host.partition(":")[2] or 80))) as sock:
        sock.sendall(head.encode() + data)
        head, _, answer = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        chunks, answer = answer, b""
        while size := int(chunks.partition(b"\r\n")[0], 16):
            chunks = chunks.partition(b"\r\n")[2]
            answer, chunks = answer + chunks[:size], chunks[size + 2:]
    return int(head.split()[1]), answer


def ask(url: str, messages: list[dict]) -> str:
    """The model's reply; exits with 3 if there is none to be had."""
    body = {"model": "policy", "messages": messages, "max_tokens": int(os.environ.get("MAX_TOKENS", 128))}
    for attempt in range(5):
        time.sleep(0.1 * attempt ** 2)
        try:
            status, answer = post(url + "/chat/completions", body)
            if status == 200:
                return json.loads(answer)["choices"][0]["message"]["content"] or ""
            problem = f"status {status}: {answer.decode(errors='replace')[:500]}"
            if status < 500:
                break
        except (OSError, ValueError, IndexError) as error:      # refused, reset, or an answer that was cut off
            problem = repr(error)
    print(f"--- api failed: {problem}")
    sys.exit(3)


def run(command: str) -> str:
    """Runs one command -> "exit N" and what it printed; past the time limit it is killed with its process group."""
    limit_s = float(os.environ.get("COMMAND_TIMEOUT_S", 10))
    with open("/proc/self/environ", "rb") as file:              # os.environ has an LC_CTYPE that Python itself sets
        env = dict(pair.split("=", 1) for pair in os.fsdecode(file.read()).split("\0") if "=" in pair)
    env = {key: value for key, value in env.items() if key not in OWN}
    command = command.replace("\0", "")                         # as bash itself does
    process = subprocess.Popen(["bash", "-c", command], env=env, start_new_session=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline, output, size = time.monotonic() + limit_s, bytearray(), 0
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.05)[0]:
            data = os.read(process.stdout.fileno(), 65536)
            if not data:                                        # closed by all who held it
                break
            output, size = output + data, size + len(data)
            output[2400:max(2400, len(output) - 2400)] = b""    # bounded: a command may print for ever
        elif process.poll() is not None:                        # ended; something in the background holds the pipe
            break
    try:
        status = f"exit {process.wait(max(0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = f"timeout: killed after {limit_s:g} s"
    text = output.decode(errors="replace")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS // 2]}\n[... {size} bytes in all ...]\n{text[-SHOWN_CHARS // 2:]}"
    return f"{status}\n{text}".rstrip()


def main():
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").rstrip("/")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": os.environ["INSTRUCTION"]}]
    for turn in range(int(os.environ.get("MAX_TURNS", 4))):
        reply = ask(url, messages)
        print(f"--- reply {turn + 1}\n{reply}", flush=True)
        if reply.strip() == "DONE":
            return
        fence = re.search(r"```(?:\w*\n)?(.*?)(?:```|$)", reply, re.DOTALL)
        output = run(fence[1] if fence else reply)
        print(f"--- {output}", flush=True)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": output}]
    sys.exit(4)


if __name__ == "__main__":
    main()

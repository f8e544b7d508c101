"""Runs inside a sandbox, around a harness: offers the model's unix socket as http://127.0.0.1:8000.

    python forward.py CMD ARGS...       FORWARD_PORT (8000) and FORWARD_SOCKET (/run/model.sock) move the two ends

It listens before CMD starts, passes bytes as they come, closes each direction by itself, and exits as CMD exits
(128 + signal); what is left of CMD's process group is killed then.
"""
import contextlib, os, signal, socket, sys, threading, time


def pump(source: socket.socket, sink: socket.socket):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)       # half-close: the answer may still be on its way
    except OSError:                         # one side is gone: wake the other pump
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def connect(client: socket.socket, path: str):
    with client, socket.socket(socket.AF_UNIX) as model:
        try:
            model.connect(path)
        except OSError as error:
            return print(f"forward: {path}: {error}", file=sys.stderr, flush=True)
        upward = threading.Thread(target=pump, args=(client, model), daemon=True)
        upward.start()
        pump(model, client)
        upward.join()


def accept(server: socket.socket, path: str):
    while True:
        try:
            threading.Thread(target=connect, args=(server.accept()[0], path), daemon=True).start()
        except (OSError, RuntimeError):     # no descriptor, no thread is left: some will be
            time.sleep(0.1)


def main(command: list[str]):
    server = socket.create_server(("127.0.0.1", int(os.environ.get("FORWARD_PORT", 8000))), backlog=128)
    with open("/proc/self/environ", "rb") as file:  # os.environ has the LC_CTYPE that Python sets for itself
        env = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
    child = os.posix_spawnp(command[0], command, env, setpgroup=0)      # sockets are not inherited
    path = os.environ.get("FORWARD_SOCKET", "/run/model.sock")
    threading.Thread(target=accept, args=(server, path), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)     # at once: threads may sit in recv


if __name__ == "__main__":
    main(sys.argv[1:])

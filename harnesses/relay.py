"""Carries connections over one pipe, for a sandbox on another machine, which can mount no socket of ours.

    python relay.py [SOCKET]        inside: offers the socket (/run/model.sock), carried over standard input and output

The other end is `over_exec`, for sandbox.py. A frame: number of its connection (4 bytes), length (4),
data; without data: no more comes this way. An agent may write to the pipe as well, and reaches its own session by it. A
client that does not read its answer holds up the others of its sandbox.
"""
import contextlib, itertools, math, os, select, socket, struct, sys, threading, time

MOST_BYTES, MOST_CONNECTIONS = 1 << 16, 256


class Frames:
    """read(n) -> n bytes, fewer at the end; write(bytes); connect() -> a socket for a new number, None: none is new."""

    def __init__(self, read, write, connect=None):
        self.read, self.write, self.connect = read, write, connect
        self.sockets, self.half_closed = {}, set()
        self.lock, self.end_lock = threading.Lock(), threading.Lock()       # one lock: two full pipes could hold it

    def send(self, number: int, data=b""):
        with self.lock: self.write(struct.pack(">II", number, len(data)) + data)

    def add(self, number: int, sock):
        self.sockets[number] = sock
        threading.Thread(target=self.pump, args=(number, sock), daemon=True).start()

    def pump(self, number: int, sock):
        with contextlib.suppress(OSError):
            while data := sock.recv(MOST_BYTES): self.send(number, data)
        with contextlib.suppress(OSError, ValueError):      # the pipe is closed, and with it all
            self.send(number)
        self.end(number)

    def end(self, number: int):
        """One direction is over; after the second the connection is."""
        with self.end_lock:
            is_over = number in self.half_closed
            self.half_closed ^= {number}
        if is_over and (sock := self.sockets.pop(number, None)): sock.close()

    def receive(self, number: int, data: bytes):
        if number not in self.sockets:
            if not self.connect: return
            try:
                if len(self.sockets) >= MOST_CONNECTIONS: raise OSError("too many")
                self.add(number, self.connect())
            except OSError: return self.send(number)
        try:
            if data: return self.sockets[number].sendall(data)
            self.sockets[number].shutdown(socket.SHUT_WR)       # half-close: the answer may still be on its way
        except (OSError, KeyError):         # it is gone: wake its pump
            with contextlib.suppress(OSError, KeyError): self.sockets[number].shutdown(socket.SHUT_RDWR)
        if not data: self.end(number)

    def run(self):
        """Until the pipe is closed."""
        with contextlib.suppress(OSError, ValueError):
            while len(head := self.read(8)) == 8:
                number, size = struct.unpack(">II", head)
                if size > MOST_BYTES: break
                self.receive(number, self.read(size))
        for sock in list(self.sockets.values()):
            with contextlib.suppress(OSError): sock.shutdown(socket.SHUT_RDWR)


def over_exec(wire, connect) -> Frames:
    """For this machine: wire leads to the daemon, and by it to the input and output of an exec of this file."""
    output, ready = bytearray(), select.poll()
    ready.register(wire, select.POLLIN)

    def exactly(size, deadline):
        data = bytearray()
        while len(data) < size:
            while not (hasattr(wire, "pending") and wire.pending() or ready.poll(1000)):
                if time.monotonic() > deadline: return b""
            with frames.lock:               # TLS: OpenSSL does not bear one thread that reads and one that writes
                if not (chunk := wire.recv(size - len(data))): break
            data += chunk
        return bytes(data)

    def read(size, timeout_s=math.inf):     # the daemon has frames of its own: stream (4 bytes), length (4), data
        deadline = time.monotonic() + timeout_s
        while len(output) < size and (head := exactly(8, deadline)):
            output.extend(exactly(int.from_bytes(head[4:], "big"), deadline))
        data = bytes(output[:size])
        del output[:size]
        return data
    frames = Frames(read, wire.sendall, connect)
    return frames


def main(path="/run/model.sock"):
    def write(data):
        while data: data = data[os.write(1, data):]
    frames = Frames(sys.stdin.buffer.read, write)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)                     # of one that was killed
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    os.chmod(path, 0o666)
    server.listen(128)

    def accept():
        for number in itertools.count(1):
            try:
                frames.add(number, server.accept()[0])
            except (OSError, RuntimeError):         # no descriptor, no thread is left: some will be
                if sock := frames.sockets.pop(number, None): sock.close()
                time.sleep(0.1)
    frames.read(8)                          # the other end listens: what came earlier could be lost
    frames.send(0)
    threading.Thread(target=accept, daemon=True).start()
    frames.run()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs inside a sandbox: writes a harness's configuration into a folder of its own, then becomes the harness.

    python launch.py '{"NAME": "TEXT", ...}' CMD ARGS...

In texts, arguments and environment @STATE@ is that folder, which never lies in the workdir; @WORKDIR@ where the task
is; @INSTRUCTION@ what to do; @CONTEXT_TOKENS@ the model's context; @REPLY_TOKENS@ what of it to leave for a reply. In
texts "@NAME@", quotes included, is the value as JSON. A command that does not name @INSTRUCTION@ reads it from standard
input. HOME stays the image's own, since tasks may look there, unless it cannot be written.
"""
import json, os, re, sys, tempfile


def main(files: dict[str, str], command: list[str]):
    with open("/proc/self/environ", "rb") as file:  # os.environ has the LC_CTYPE that Python sets for itself
        env = dict(os.fsdecode(pair).split("=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
    workdir, context_tokens = os.getcwd(), int(env.pop("CONTEXT_TOKENS", 65536))
    place = next((place for place in ("/var/tmp", "/tmp") if os.access(place, os.W_OK)
                  and not f"{place}/".startswith(f"{workdir.rstrip('/')}/")), "/dev/shm")
    values = {"STATE": tempfile.mkdtemp(prefix="harness-", dir=place), "WORKDIR": workdir,
              "INSTRUCTION": env.pop("INSTRUCTION"), "CONTEXT_TOKENS": context_tokens,
              "REPLY_TOKENS": min(context_tokens // 4, 32000)}

    def fill(text):
        return re.sub('("?)@(' + "|".join(values) + r')@\1', lambda match:
                      json.dumps(values[match[2]]) if match[1] else str(values[match[2]]), text)
    for name, text in files.items():
        path = os.path.join(values["STATE"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(fill(text))
    env = {key: fill(value) for key, value in env.items()}
    if not os.access(env.get("HOME") or "/nowhere", os.W_OK):
        env["HOME"] = values["STATE"]
    asked = os.memfd_create("instruction") if not any("@INSTRUCTION@" in word for word in command) else None
    if asked is not None:
        with open(asked, "w", closefd=False) as file:
            file.write(values["INSTRUCTION"])
        os.lseek(asked, 0, os.SEEK_SET)
        os.dup2(asked, 0)
    os.execvpe(command[0], [fill(word) for word in command], env)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])

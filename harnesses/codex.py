"""Codex CLI 0.171.0: a static binary, for any image; OpenAI responses, streamed, about 9k tokens of prompt, 8 tools.

Quirks: the history comes back byte for byte, arguments too; client_metadata changes its key order between attempts.
A reply cut off by max_tokens, and a full context, end it with status 1. Its stream time limit of 300 s, for which
comments do not count, is lifted here: a policy that is being updated answers late. Web search is off: it is OpenAI's.
Its apply_patch is a command on the PATH only where CODEX_HOME is not below /tmp.
"""
from harnesses import ARCH, MODULES, Harness, launch, tool_calls

TRIPLE = {"x64": "x86_64", "arm64": "aarch64"}.get(ARCH, ARCH) + "-unknown-linux-musl"
BINARY = f"{MODULES}/@openai/codex/vendor/{TRIPLE}/bin/codex"
CONFIG = """model = "policy"
model_provider = "proxy"
model_context_window = "@CONTEXT_TOKENS@"
check_for_update_on_startup = false
web_search = "disabled"
[model_providers.proxy]
name = "proxy"
base_url = "http://127.0.0.1:8000/v1"
wire_api = "responses"
stream_idle_timeout_ms = 36000000
[analytics]
enabled = false
"""

HARNESS = Harness(
    argv=launch({"config.toml": CONFIG}, BINARY, "exec", "--dangerously-bypass-approvals-and-sandbox",
                "--skip-git-repo-check", "--json", "-"),
    env={"CODEX_HOME": "@STATE@"},
    package=f"npm:@openai/codex@0.171.0-linux-{ARCH}",
    memory_mb=512,
    version=(BINARY, "--version"),
    demonstrate=tool_calls("exec_command", "cmd"),
)

"""Claude Code 2.1.332: a native binary that needs glibc; Anthropic messages, streamed, about 12k tokens of prompt.

Quirks: for an unknown model it assumes a context of 1M tokens, unless it is told; it sums up some 13,000 tokens and a
reply before that is full, so give it 48k or more; its tool list grows in mid-run when
the model uses ToolSearch; subagents run beside the main agent on the same session; after compaction the history is
rewritten from message 0 on. A message in the middle of the list has the role system. Arguments come back parsed.
"""
from harnesses import ARCH, MODULES, Harness, launch, tool_calls

BINARY = f"{MODULES}/@anthropic-ai/claude-code-linux-{ARCH}/claude"
MODELS = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
          "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")

HARNESS = Harness(
    argv=launch({}, BINARY, "-p", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"),
    env={"CLAUDE_CONFIG_DIR": "@STATE@", "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000", "ANTHROPIC_AUTH_TOKEN": "none",
         **dict.fromkeys(MODELS, "policy"),
         "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "@CONTEXT_TOKENS@", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "@REPLY_TOKENS@",
         "IS_SANDBOX": "1",                             # else it refuses to skip permissions as root
         "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",         # a system block that changes from one call to the next
         "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
         "DISABLE_AUTOUPDATER": "1"},
    package=f"npm:@anthropic-ai/claude-code-linux-{ARCH}@2.1.332",
    memory_mb=4096,
    version=(BINARY, "--version"),
    demonstrate=tool_calls("Bash", "command"),
)

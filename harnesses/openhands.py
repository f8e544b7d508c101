"""OpenHands SDK 1.58.2, on Python >= 3.12: chat completions, not streamed, about 8k tokens of prompt, 5 tools.

Quirks: what counts as done is a finish call or a reply without a tool call; broken arguments come back as
_openhands_malformed_tool_call; reasoning is dropped from the history, but for some model names; after a condensation
the task's own text is gone from it. The terminal tool is a long-lived shell, in tmux where the image has it. Its time
limit of 300 s is lifted: a policy that is being updated answers late.
"""
from harnesses import Harness, launch, python_app, tool_calls

RUN = """
from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
llm = LLM(model="openai/policy", base_url="http://127.0.0.1:8000/v1", api_key="none", usage_id="agent", timeout=36000,
          max_input_tokens=@CONTEXT_TOKENS@ - @REPLY_TOKENS@, max_output_tokens=@REPLY_TOKENS@)
conversation = Conversation(get_default_agent(llm=llm, cli_mode=True), workspace=".", visualizer=None,
                            callbacks=[lambda event: print(event.model_dump_json(), flush=True)])      # a transcript
conversation.send_message(sys.stdin.read())
conversation.run()
print("status", conversation.state.execution_status.value)
"""

HARNESS = Harness(
    argv=launch({}, *python_app(RUN)),
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1", "OH_PERSISTENCE_DIR": "@STATE@",
         "HISTFILE": "@STATE@/history"},                # of the interactive shell in its terminal
    needs=("python3.12",),
    package="pip3.12:openhands-sdk==1.58.2 openhands-tools==1.58.2 litellm==1.105.7",
    memory_mb=1024,
    version=tuple(python_app("from importlib.metadata import version; print(version('openhands-sdk'))")),
    demonstrate=tool_calls("terminal", "command"),
)

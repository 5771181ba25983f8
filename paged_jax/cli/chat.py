"""Chat with a model: one answer to a message, or a conversation without one."""

import argparse
import sys
import time
from typing import TYPE_CHECKING

from paged_jax.cli import options
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("message", nargs="?", help="one-shot message; without it: interactive")
    parser.add_argument("--system", help="system message")
    options.add_model(parser)
    options.add_sampling(parser, max_tokens=256)
    options.add_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one message, or reads messages until end of input."""
    params = options.sampling_params(arguments)
    engine = {"max_num_seqs": 1, **options.engine_options(arguments)}
    from paged_jax.cli.status import startup_status

    with startup_status():
        from paged_jax.llm import LLM

        llm = LLM(arguments.model, **engine)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.message is not None:
        _answer(llm, [*messages, {"role": "user", "content": arguments.message}], params)
        return 0
    return _converse(llm, messages, params)


def _converse(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams) -> int:
    if sys.stdin.isatty():
        print("Type a message; an empty line or Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if not message.strip():
            return 0
        asked = [*messages, {"role": "user", "content": message}]
        try:
            answer = _answer(llm, asked, params)
        except ValueError as error:  # such as a conversation that outgrew the context
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(interrupted)", file=sys.stderr)
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Streams one answer to stdout and its figures to stderr."""
    from paged_jax.cli.status import startup_status

    start = time.monotonic()
    outputs = llm.stream(llm.render(messages), params)
    with startup_status():
        # The first token comes from a prefill program and the second from a decode program; each
        # may have to be compiled, and neither compiles afterwards.
        output = next(outputs)
        first = time.monotonic()
        output = next(outputs, output)
    shown = _show(output, 0)
    warm, num_warm = time.monotonic(), len(output.outputs[0].token_ids)
    for output in outputs:
        shown = _show(output, shown)
    print(flush=True)
    completion = output.outputs[0]
    later = len(completion.token_ids) - num_warm
    speed = f", then {later / (time.monotonic() - warm):.1f} tokens/s" if later else ""
    stats = llm.stats()
    print(
        f"[{len(output.prompt_token_ids)} prompt + {len(completion.token_ids)} output tokens, "
        f"first after {first - start:.2f} s{speed}, "
        f"{output.num_blocks} of {stats['num_blocks']} KV blocks, "
        f"finish: {completion.finish_reason}]",
        file=sys.stderr,
    )
    return completion.text


def _show(output: RequestOutput, shown: int) -> int:
    text = output.outputs[0].text
    print(text[shown:], end="", flush=True)
    return len(text)

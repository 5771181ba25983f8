"""Complete prompts, all in one batch."""

import argparse
import dataclasses
import json

from paged_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to complete")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    options.add_model(parser)
    options.add_sampling(parser, max_tokens=64)
    options.add_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints each prompt with its completion."""
    params = options.sampling_params(arguments)
    engine = {"max_num_seqs": min(256, len(arguments.prompts)), **options.engine_options(arguments)}
    from paged_jax.cli.status import startup_status

    with startup_status():
        from paged_jax.llm import LLM

        llm = LLM(arguments.model, **engine)
    outputs = llm.generate(arguments.prompts, params, use_tqdm=not arguments.json)
    for output in outputs:
        if arguments.json:
            print(json.dumps(dataclasses.asdict(output), ensure_ascii=False))
        else:
            print(f"{output.prompt}{output.outputs[0].text}")
    return 0

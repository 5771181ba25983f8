"""The report that is due whenever a GPU is at hand: is it right, and how fast?

conformance   tests/kernels/test_gpu_device.py, compiled for and run on the device
sanitizer     compute-sanitizer's memcheck over gpu_sanitize.py, where it is on PATH
bandwidth     the table of kernel_gpu.py
smollm2       gpu_end_to_end.py: the embedded model, its tokens and its speed
llama3-8b     gpu_end_to_end.py: random weights in the shapes of Llama 3 8B

Each step is a process of its own: one that fails is in the report as such, the others run, and the
exit status is 1. The text replaces what stands between two markers in docs/kernels.md.

    python benchmarks/gpu_report.py                     # on a GPU; an hour
    python benchmarks/gpu_report.py --steps smollm2 --output FILE
    python benchmarks/gpu_report.py --toy --output FILE # anywhere: interpreted, tiny, no times
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent

DOCUMENT = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- gpu-report:begin -->", "<!-- gpu-report:end -->"
TIMEOUT_S = 3600
TAIL_CHARS = 600


class StepFailed(Exception):
    """A step did not do what it is to do; the text may hold what there is of it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where steps put their files, and whether they are to be toys."""

    folder: Path
    is_toy: bool

    def python(self, *words: str, before: Sequence[str] = (), **env: str) -> str:
        """Standard output of a Python that ran well.

        Raises: StepFailed with the end of what was printed.
        """
        environ = os.environ | env
        if self.is_toy:
            environ |= {"JAX_PLATFORMS": "cpu"}
        command = [*before, sys.executable, *words]
        log = self.folder / "stderr"
        with log.open("w") as errors:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                raise StepFailed(f"took more than {TIMEOUT_S} s") from None
        if done.returncode:
            printed = f"{done.stdout}\n{log.read_text()}".strip()
            print(printed[-8000:], file=sys.stderr)
            raise StepFailed(f"exit status {done.returncode}: {printed[-TAIL_CHARS:]}")
        return done.stdout

    def benchmark(self, name: str, *words: str, before: Sequence[str] = (), **env: str) -> str:
        """Standard output of a file of this folder."""
        return self.python(str(BENCHMARKS / name), *words, before=before, **env)


def conformance(run: Run) -> str:
    """Runs the tests marked `gpu`; as a toy, one that is interpreted."""
    # One process: each would take most of the device's memory.
    words = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    if run.is_toy:
        words += ["tests/kernels/test_triton_conformance.py", "-k", "by_hand and decode"]
    else:
        words += ["-m", "gpu", "tests/kernels/test_gpu_device.py"]
    summary = run.python(*words).strip().splitlines()[-1].strip("= ")
    if "passed" not in summary:
        raise StepFailed(f"no test ran: {summary}")
    kind = "rows worked by hand, interpreted" if run.is_toy else "compiled, on the device"
    return f"Conformance, {kind}: {summary}."


def sanitizer(run: Run) -> str:
    """Runs memcheck; as a toy, the script is traced without it."""
    tool = shutil.which("compute-sanitizer")
    if run.is_toy:
        run.benchmark("gpu_sanitize.py", "--trace")
        return "compute-sanitizer: its script can be traced; the tool was not used."
    if tool is None:
        return "compute-sanitizer: not installed."
    before = [tool, "--tool", "memcheck", "--error-exitcode", "9"]
    # Arrays are allocations of their own then, so that reads past their ends are seen.
    printed = run.benchmark(
        "gpu_sanitize.py", before=before, XLA_PYTHON_CLIENT_ALLOCATOR="platform"
    )
    found = [line.strip("= ") for line in printed.splitlines() if "ERROR SUMMARY" in line]
    if not found:
        raise StepFailed("memcheck printed no summary")
    calls = ", ".join(line for line in printed.splitlines() if line.startswith(("ran", "refused")))
    return f"compute-sanitizer memcheck: {found[-1]}; {calls}."


def bandwidth(run: Run) -> str:
    """Makes the table; what there is of it where the benchmark ended early."""
    import kernel_gpu  # and JAX, which finds no device here: the steps need its memory

    path = run.folder / "kernel_gpu.json"
    words = ["--interpret", "--repeats", "1"] if run.is_toy else []
    failure = None
    try:
        run.benchmark("kernel_gpu.py", "--json", str(path), *words)
    except StepFailed as error:
        failure = error
    table = kernel_gpu.markdown(json.loads(path.read_text())) if path.exists() else ""
    if failure is not None:
        raise StepFailed(f"{failure}\n\n{table}".strip())
    return table


def smollm2(run: Run) -> str:
    """Runs the embedded model."""
    return _end_to_end(run, "smollm2")


def llama3_8b(run: Run) -> str:
    """Runs a large model of random weights."""
    return _end_to_end(run, "llama3-8b")


def _end_to_end(run: Run, name: str) -> str:
    path = run.folder / f"{name}.json"
    run.benchmark("gpu_end_to_end.py", name, "--json", str(path), *["--toy"] * run.is_toy)
    return "\n".join(json.loads(path.read_text())["lines"])


STEPS: dict[str, Callable[[Run], str]] = {
    "conformance": conformance,
    "sanitizer": sanitizer,
    "bandwidth": bandwidth,
    "smollm2": smollm2,
    "llama3-8b": llama3_8b,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse_options(arguments)
    replace_between(DOCUMENT.read_text(), "")  # fails now rather than after an hour
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder=Path(folder), is_toy=options.toy)
        texts, failed = run_steps({name: STEPS[name] for name in options.steps}, run)
    body = "\n\n".join([heading(options.toy), *texts])
    options.output.write_text(replace_between(DOCUMENT.read_text(), body))
    print(f"\n{body}\n\nwritten to {options.output}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default=",".join(STEPS), help=f"of {','.join(STEPS)}")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="instead of docs/kernels.md, a changed copy"
    )
    parser.add_argument("--toy", action="store_true", help="interpreted, tiny; needs --output")
    options = parser.parse_args(arguments)
    options.steps = options.steps.split(",")
    for step in options.steps:
        if step not in STEPS:
            parser.error(f"--steps: {step!r} is not one of {', '.join(STEPS)}")
    if options.toy and options.output is None:
        parser.error("--toy writes no figures into docs/kernels.md: name another file by --output")
    options.output = options.output or DOCUMENT
    return options


def run_steps(steps: dict[str, Callable[[Run], str]], run: Run) -> tuple[list[str], list[str]]:
    """Their texts, in order, and the names of those that failed; every one runs."""
    texts, failed = [], []
    for name, step in steps.items():
        print(f"== {name}", flush=True)
        try:
            texts.append(step(run))
        except Exception as error:  # whatever it is, the other steps are wanted
            failed.append(name)
            kind = "" if isinstance(error, StepFailed) else f"{type(error).__name__}: "
            texts.append(f"**{name} failed**: {kind}{error}")
    return texts, failed


def heading(is_toy: bool) -> str:
    """Device, versions, date and commit."""
    if is_toy:
        return "**A toy run on CPU, interpreted: nothing here is of a GPU.**"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = _printed(query).splitlines()[0] if shutil.which(query[0]) else "a device unknown"
    commit = _printed(["git", "rev-parse", "--short", "HEAD"])
    changes = " with changes" if _printed(["git", "status", "--porcelain"]) else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"`python benchmarks/gpu_report.py` on {device} (name, driver), {versions}, {today}, "
        f"commit {commit}{changes}."
    )


def _printed(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def replace_between(text: str, body: str) -> str:
    """The text with another body between the markers.

    Raises: ValueError unless each marker is there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the document must hold {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


if __name__ == "__main__":
    raise SystemExit(main())

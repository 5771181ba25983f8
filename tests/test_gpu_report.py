"""The scripts that measure on a GPU: what of them needs none."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pallas_kernels.gpu import config
from pallas_kernels.gpu.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).resolve().parents[1]
H100 = "NVIDIA H100 80GB HBM3"
KEY = "H32 K8 D128 P16 bfloat16 bfloat16"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Makes the scripts importable, as they import each other."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def load_of(batch, length, block_size, **shape):
    from gpu_load import Load, Shape

    return Load(shape=Shape(**shape), batch=batch, length=length, block_size=block_size)


def test_bytes_of_a_step_are_those_worked_out_by_hand():
    # A token: keys and values of 8 heads of 128 in 2 bytes, 4096. Queries and outputs of a row:
    # 2 x 32 x 128 x 2 = 16384. Its table: 128 blocks and a length, 4 bytes each.
    assert load_of(64, 2048, 16).step_bytes == 64 * (2048 * 4096 + 16384 + 4 * 129) == 537_952_512
    # 3 of 4 positions of the second block are live; dead slots are not counted.
    small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert load_of(1, 7, 4, **small).step_bytes == 7 * 128 + 2 * 128 + 4 * 3
    # A byte a number, and 4 bytes of scale for each key and value.
    int8 = load_of(1, 7, 4, **small, pool_dtype="int8")
    assert int8.step_bytes == 7 * 2 * 2 * (16 + 4) + 2 * 128 + 4 * 3
    assert load_of(1, 1, 16, **small, dtype="float32").step_bytes == 128 + 2 * 256 + 4 * 2


def test_layers_are_as_many_as_caches_cannot_hold():
    tiny, small, large = load_of(1, 512, 16), load_of(8, 2048, 16), load_of(64, 2048, 16)
    assert (tiny.num_layers, small.num_layers, large.num_layers) == (64, 4, 1)
    assert (tiny.num_calls, small.num_calls, large.num_calls) == (64, 32, 32)
    assert large.pool_bytes == (64 * 128 + 1) * 16 * 4096


def test_a_row_of_the_table_says_the_share_of_the_roofline():
    from kernel_gpu import Cell, markdown, row_of

    load = load_of(64, 2048, 16)
    cells = {
        "fast": Cell(text="134.5 us", us=134.5),
        "refused": Cell(text="head_dim 80 | no"),
        "failed": Cell(text="x" * 200, is_fault=True),
    }
    # 537,952,512 bytes at 5 TB/s: 107.6 us, which is 80 % of 134.5.
    row = row_of(load, cells, 5e12)
    report = {"rows": [row], "copy_gb_s": 5000.0, "shape": dataclasses.asdict(load.shape)}
    head, _, names, _, line = markdown(report).splitlines()
    assert "copy within the device 5000 GB/s" in head
    assert names.split(" | ")[-3:] == ["fast", "refused", "failed |"]
    assert line.startswith(
        "| 64 | 2048 | 16 | 538.0 | 107.6 | 134.5 (80 %) | head_dim 80 / no | xxx"
    )
    assert line.endswith("... |")
    assert len(line) < 180


def test_nothing_is_timed_without_a_bandwidth():
    from kernel_gpu import Cell, markdown, row_of

    load = load_of(1, 16, 16)
    row = row_of(load, {"fast": Cell(text="right")}, None)
    report = {"rows": [row], "copy_gb_s": None, "shape": dataclasses.asdict(load.shape)}
    text = markdown(report)
    assert "nothing is timed" in text
    assert text.endswith("| 1 | 16 | 16 | 0.1 | - | right |")


def test_an_error_is_a_fraction_of_what_must_come_out():
    import numpy as np
    from gpu_load import checked_rows, error_of

    load = load_of(8, 16, 16, num_heads=1, num_kv_heads=1, head_dim=2)
    assert checked_rows(load) == [0, 7]
    assert checked_rows(load_of(1, 16, 16)) == [0]
    out, want = np.ones((8, 1, 2)), np.ones((2, 1, 2))
    assert error_of(load, out, want) == 0.0
    out[7] = 1.5
    assert error_of(load, out, want) == pytest.approx(0.5 * 0.5**0.5)
    out[3] = np.nan  # a row that the oracle is not asked about
    assert error_of(load, out, want) == float("inf")


def test_the_report_replaces_what_is_between_the_markers():
    from gpu_report import BEGIN, DOCUMENT, END, replace_between

    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = replace_between(text, "| new |")
    assert new == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    assert replace_between(new, "| new |") == new
    for wrong in ("none", f"{BEGIN} only", f"{END} {BEGIN}", text + text):
        with pytest.raises(ValueError, match="once each, in this order"):
            replace_between(wrong, "")
    replace_between(DOCUMENT.read_text(), "")  # it has them


def test_a_step_that_fails_is_reported_and_the_others_run(tmp_path):
    from gpu_report import Run, StepFailed, run_steps

    def fails(run):
        raise StepFailed("exit status 3")

    def breaks(run):
        raise KeyError("lines")

    steps = {"a": fails, "b": breaks, "c": lambda run: "fine"}
    texts, failed = run_steps(steps, Run(folder=tmp_path, is_toy=True))
    assert texts == ["**a failed**: exit status 3", "**b failed**: KeyError: 'lines'", "fine"]
    assert failed == ["a", "b"]


def test_a_process_that_fails_says_how_it_ended(tmp_path, capsys):
    from gpu_report import Run, StepFailed

    run = Run(folder=tmp_path, is_toy=True)
    assert run.python("-c", "import os; print(os.environ['JAX_PLATFORMS'])") == "cpu\n"
    with pytest.raises(StepFailed, match=r"(?s)exit status 1: .*ZeroDivisionError"):
        run.python("-c", "1 / 0")


def test_a_toy_never_writes_into_the_documents(capsys):
    from gpu_report import main

    with pytest.raises(SystemExit):
        main(["--toy"])
    assert "name another file by --output" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["kernel_gpu", "gpu_end_to_end"])
def test_scripts_refuse_to_measure_without_a_gpu(script, capsys):
    words = ["smollm2"] if script == "gpu_end_to_end" else []
    assert importlib.import_module(script).main(words) == 2
    assert "and JAX found cpu" in capsys.readouterr().err


@pytest.fixture
def tune(monkeypatch):
    """The script that fills the tables, and no measuring."""
    monkeypatch.delitem(sys.modules, "tune", raising=False)
    import tune

    monkeypatch.setattr(tune, "inputs_of", lambda *_: pytest.fail("allocates"))
    return tune


def test_tune_says_what_it_would_do_on_a_gpu(tune, capsys):
    asked = ["--shapes", "llama3-8b", "--block-sizes", "16", "--pool-dtypes", "bfloat16"]
    assert tune.main(["--dry-run", "--device-kind", H100, *asked]) == 0
    text = capsys.readouterr().out
    assert f"decode llama3-8b, blocks of 16, bfloat16: entry {KEY}" in text
    assert "block_k=128 num_warps=8 num_stages=5 num_programs=1320" in text
    assert "tile_rows=128 block_k=32 num_warps=4 num_stages=3" in text


def test_what_tune_writes_is_found_by_the_kernels(tune, monkeypatch, tmp_path):
    import tune_gpu

    entries = {
        "decode": DecodeConfig(block_k=128, num_warps=8, num_stages=5, num_programs=264),
        "prefill": PrefillConfig(tile_rows=128, block_k=32, num_warps=8, num_stages=5),
    }

    def medians(case, plan, info, options):
        return {name: 1.0 if found == entries[case.kernel] else 2.0 for name, found in plan.items()}

    monkeypatch.setattr(tune, "measure", medians)
    monkeypatch.setattr(tune_gpu, "TUNED", tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    # On a GPU that is only traced for: the plan of a dry run, which is measured all the same.
    options = tune._parse_options(
        ["--shapes", "llama3-8b", "--block-sizes", "16", "--pool-dtypes", "bfloat16"]
    )
    with tune_gpu.traced_for(H100):
        info = tune_gpu.facts()
        path = tune_gpu.TUNED / f"{tune_gpu.table_name(info)}.json"
        for case in tune._cases(options, tune_gpu):
            plan = tune.candidates(case)
            best = tune.choose(tune.measure(case, plan, info, options), 0.02)
            tune.merge(path, f"paged_{case.kernel}", case.ask(None)[1], plan[best])
    assert path.name == "h100.json"
    monkeypatch.setattr(config, "resources", SimpleNamespace(files=lambda _: tmp_path))
    config._table.cache_clear()
    with tune_gpu.traced_for(H100):
        assert config.lookup("paged_decode", KEY, DecodeConfig) == entries["decode"]
        assert config.lookup("paged_prefill", KEY, PrefillConfig) == entries["prefill"]
        assert config.lookup("paged_decode", KEY.replace("P16", "P64"), DecodeConfig) is None
    config._table.cache_clear()
    assert json.loads(path.read_text())["paged_decode"][KEY] == dataclasses.asdict(
        entries["decode"]
    )


def test_tables_are_packaged():
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = data["tool"]["setuptools"]["package-data"]["pallas_kernels"]
    for folder in ("gpu/tuned", "tpu/tuned"):
        assert f"{folder}/*" in listed
        assert (ROOT / "pallas_kernels" / folder / "README.md").exists()

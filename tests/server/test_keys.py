"""Keys as they are written down: entries, what is wrong with them, and how `anycore key new` makes them."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from anycore.cli.main import main
from anycore.config import ServerConfig
from anycore.errors import ConfigError
from anycore.server.auth import Guard, read_keys
from anycore.server.keys import MAX_KEYS, SCOPES, Key, check_apart, entry_of, hash_of, new_secret, read_entries

HASH = hash_of(b"secret")
MADE = re.compile(r"ak-[A-Za-z0-9_-]{43}")


def keys_of(path: Path) -> list[Key]:
    return read_keys(ServerConfig(api_key_file=str(path)), {}).keys


def test_an_entry_is_written_and_read_back() -> None:
    keys = [
        Key(name="plain", sha256=HASH),
        Key(
            name="all",
            sha256=hash_of(b"other"),
            scopes=frozenset(SCOPES),
            requests_per_minute=1,
            tokens_per_minute=2,
            max_concurrent=3,
            max_tokens=4,
            weight=0.5,
        ),
    ]
    assert read_entries("\n".join(map(entry_of, keys))) == keys


def test_entries_are_yaml_or_json_and_dashes_are_underscores() -> None:
    expected = [Key(name="a", sha256=HASH, scopes=frozenset(("infer", "metrics")), tokens_per_minute=5)]
    yaml = f"# the team's\n- name: a\n  sha256: {HASH}\n  scopes: [infer, metrics]\n  tokens-per-minute: 5\n"
    json = f'[{{"name": "a", "sha256": "{HASH}", "scopes": ["metrics", "infer"], "tokens_per_minute": 5}}]'
    assert read_entries(yaml) == read_entries(json) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- name: [", "line 1"),
        ("name: a", "list"),
        ("[]", "list"),
        ("", "list"),
        (f"- sha256: {HASH}", "name"),
        ("- name: a", "sha256"),
        ("- just-a-key", "object"),
        (f"- {{name: a, sha256: {HASH}, max_token: 3}}", "max_token"),
        (f"- {{name: a, sha256: {HASH}, scopes: [root]}}", "root"),
        (f"- {{name: a, sha256: {HASH}, max_tokens: 0}}", "max_tokens of key a"),
        (f"- {{name: a, sha256: {HASH}, max_tokens: 2.5}}", "max_tokens"),
        (f"- {{name: a, sha256: {HASH}, requests_per_minute: {2**31}}}", str(2**31)),
        (f"- {{name: a, sha256: {HASH}, weight: 0}}", "weight"),
        (f"- {{name: a, sha256: {HASH}, weight: .nan}}", "weight"),
        (f"- {{name: a b, sha256: {HASH}}}", "name 'a b'"),
        (f"- {{name: a, sha256: {HASH.upper()}}}", "sha256 of key a"),
        ("- {name: a, sha256: ak-the-key-itself}", "sha256 of key a"),
        ("\n".join(f"- {{name: a{i}, sha256: {HASH}}}" for i in range(MAX_KEYS + 1)), str(MAX_KEYS)),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_entries(text)
    assert "the-key-itself" not in str(caught.value)  # who took the key for its hash finds it in no log


def test_two_keys_with_one_name_or_one_hash_are_refused() -> None:
    for other in (Key(name="a", sha256=hash_of(b"other")), Key(name="b", sha256=HASH)):
        with pytest.raises(ConfigError, match="given once"):
            check_apart([Key(name="a", sha256=HASH), other])


def test_entries_in_a_file_of_plain_keys_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(entry_of(Key(name="a", sha256=HASH)) + "\n")
    with pytest.raises(ConfigError, match=r"\.yaml"):
        keys_of(path)


def test_nothing_but_the_hash_is_kept() -> None:
    guard = Guard(read_keys(ServerConfig(api_key=("the-secret",)), {}).keys)
    known = [part for pair in guard._keys for part in pair]
    assert "the-secret" not in repr(known)
    assert guard.admit("/v1/models", b"Bearer the-secret").key is not None


def test_new_keys_differ_and_show_whose_they_are() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(MADE.fullmatch(secret) for secret in made)


def test_key_new_prints_the_key_and_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scopes", "infer", "metrics", "--requests-per-minute", "60", "--max-tokens", "9", "--weight", "2"]
    assert main(["key", "new", "ci", *words]) == 0
    printed = capsys.readouterr()
    secret, entry = printed.out.splitlines()
    assert MADE.fullmatch(secret)
    assert secret not in entry + printed.err
    expected = Key(
        name="ci",
        sha256=hash_of(secret.encode()),
        scopes=frozenset(("infer", "metrics")),
        requests_per_minute=60,
        max_tokens=9,
        weight=2,
    )
    assert read_entries(entry) == [expected]


def test_key_new_adds_to_a_file_that_a_server_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    secrets = []
    for name in ("one", "two"):
        assert main(["key", "new", name, "--file", str(path)]) == 0
        secrets += capsys.readouterr().out.splitlines()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # as editors may leave it
    assert main(["key", "new", "three", "--file", str(path)]) == 0
    secrets += capsys.readouterr().out.splitlines()
    guard = Guard(keys_of(path))
    admitted = [guard.admit("/v1/models", f"Bearer {secret}".encode()).key for secret in secrets]
    assert [key.name for key in admitted if key] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("keys.yaml", f"- {{name: ci, sha256: {HASH}}}\n", "same name"),
        ("keys.yaml", "models: []\n", "stays as it was"),
        ("keys.json", f'[{{"name": "a", "sha256": "{HASH}"}}]\n', ".yaml"),
        ("keys.txt", "plain-key\n", ".yaml"),
        ("folder/keys.yaml", None, "stays as it was"),
    ],
)
def test_key_new_breaks_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, there: str | None, said: str
) -> None:
    path = tmp_path / name
    if there is not None:
        path.write_text(there)
    assert main(["key", "new", "ci", "--file", str(path)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
    assert (path.read_text() if path.exists() else None) == there


@pytest.mark.parametrize("words", [["a/b"], ["a", "--max-tokens", "0"], ["a", "--weight", "0"], ["a", "--scopes", "x"]])
def test_key_new_refuses_what_a_server_would(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["key", "new", *words])
    except SystemExit as end:  # argparse's
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert capsys.readouterr().out == ""

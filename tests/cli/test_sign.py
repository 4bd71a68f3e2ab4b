"""`memopt sign`, and signing at the end of `memopt compress`."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import TINY_GLM5
from tiny_releases import KEY, write_release

from cli.invoke import invoke, run_command
from memopt.cli.signing_options import parse_expiry
from memopt.errors import UsageError
from memopt.manifests.manifest import parse_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_release(tmp_path / "release")
    return tmp_path / "release"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    path.write_bytes(KEY.to_pem(b"secret"))
    path.chmod(0o600)
    (tmp_path / "key.pub").write_bytes(KEY.public_key.pem)
    (tmp_path / "pass").write_text("secret\n")
    return path


def test_sign_then_verify(folder: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    arguments = ("sign", folder, "--key", key, "--passphrase-file", tmp_path / "pass", "--counter", "3")
    done = invoke(*arguments, "--not-after", "36500d")
    assert done.code == 0, done.stderr
    assert "counter 3" in done.stdout
    manifest = parse_manifest((folder / "memopt.manifest.json").read_bytes())
    assert (manifest.created, manifest.not_after) == (1700000000, 1700000000 + 36500 * 86400)
    assert invoke("verify", folder, "--key", tmp_path / "key.pub").code == 0
    first = (folder / "model.sig").read_bytes()
    verdict = invoke(*arguments, "--not-after", "36500d", "--json").verdict
    assert verdict["status"] == "ok"
    assert verdict["key_hints"] == [KEY.public_key.hint]
    assert (folder / "model.sig").read_bytes() == first


def test_sign_with_a_command(folder: Path, key: Path, tmp_path: Path) -> None:
    script = tmp_path / "hsm.py"
    script.write_text(
        "import sys\n"
        "from memopt.manifests.keys import load_private_key\n"
        f"key = load_private_key({str(key)!r}, b'secret')\n"
        "sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read()))\n"
    )
    command = f"{sys.executable} {script}"
    done = invoke("sign", folder, "--sign-cmd", command, "--public-key", tmp_path / "key.pub")
    assert done.code == 0, done.stderr
    assert invoke("verify", folder, "--key", tmp_path / "key.pub").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ((), 2, "nobody signs"),
        (("--sign-cmd", "x"), 2, "need each other"),
        (("--key", "{key}"), 3, "passphrase"),
        (("--key", "{key}", "--passphrase-env", "NOT_SET_ANYWHERE"), 2, "not set"),
        (("--key", "{gone}"), 3, "gone.pem"),
        (("--key", "{key}", "--passphrase-file", "{pass}", "--not-after", "soon"), 2, "soon"),
        (("--key", "{key}", "--passphrase-file", "{pass}", "--previous", "{gone}"), 6, "gone"),
    ],
)
def test_refusals(folder: Path, key: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    places = {"key": str(key), "pass": str(tmp_path / "pass"), "gone": str(tmp_path / "gone.pem")}
    done = invoke("sign", folder, *(argument.format(**places) for argument in arguments))
    assert (done.code, word in done.refusal) == (code, True), done.stderr
    assert not (folder / "model.sig").exists()


def test_a_key_that_others_can_read(folder: Path, key: Path, tmp_path: Path) -> None:
    key.chmod(0o644)
    arguments = ("sign", folder, "--key", key, "--passphrase-file", tmp_path / "pass")
    assert invoke(*arguments).code == 3
    assert invoke(*arguments, "--allow-open-mode").code == 0
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o644


@pytest.mark.parametrize(
    ("text", "seconds"), [("1d", 86400 + 5), ("2027-01-31", 1801353600), ("2027-01-31T00:00:01Z", 1801353601)]
)
def test_times(text: str, seconds: int) -> None:
    assert parse_expiry(text, 5) == seconds


@pytest.mark.parametrize("text", ["", "0d", "-1d", "2027-13-01", "tomorrow", "1e5"])
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError):
        parse_expiry(text, 5)


def test_compress_signs_at_the_end(key: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    secret = os.environ | {"KEY_PASSPHRASE": "secret"}
    arguments = ("compress", TINY_GLM5, out, "--recipe", "glm-5.2-int4", "--key", key)
    early = invoke(*arguments)
    assert (early.code, out.exists()) == (3, False), "a missing passphrase is said before the work"
    done = run_command(*arguments, "--passphrase-env", "KEY_PASSPHRASE", "--counter", "2", "--json", env=secret)
    assert done.code == 0, done.stderr
    verdict = invoke("verify", out, "--key", tmp_path / "key.pub", "--json").verdict
    assert verdict["root_digest"] == done.verdict["root_digest"]
    assert (verdict["counter"], verdict["identity"]) == (
        2,
        json.loads((out / "release.json").read_text())["identity"]["name"],
    )
    again = run_command(*arguments, "--passphrase-env", "KEY_PASSPHRASE", "--counter", "3", env=secret)
    assert again.code == 0, again.stderr
    assert invoke("verify", out, "--key", tmp_path / "key.pub", "--json").verdict["counter"] == 3


def test_compress_wants_a_signer_for_signing_options(tmp_path: Path) -> None:
    done = invoke("compress", TINY_GLM5, tmp_path / "out", "--counter", "2")
    assert (done.code, "nobody signs" in done.refusal) == (2, True)

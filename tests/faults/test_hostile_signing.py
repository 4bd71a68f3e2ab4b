"""What the signer refuses: rows 12, 14, 15, 17 and 41 before anything is signed, row 40 about keys."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli.invoke import invoke
from release_files import contents
from signing_keys import fixed_key
from tiny_releases import KEY, sign, signed_release, write_release

from faults.hostile_case import Case
from faults.hostile_weights import CASES
from memopt.errors import FileNameError, LayoutError, MemoptError

PASSPHRASE = "pässword with \u20ac"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_release(tmp_path_factory.mktemp("original") / "release")


@pytest.fixture
def unsigned(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    write_release(folder)
    return folder


@pytest.mark.parametrize("case", [case for case in CASES if case.row in {41, 42, 43} and case.code != 5], ids=str)
def test_a_tree_that_no_verifier_accepts_is_not_signed(case: Case, original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "release")
    case.make(folder)
    (folder / "release.json").unlink()  # names the ledger's digest, which the case has changed
    before = contents(folder)
    with pytest.raises(MemoptError) as caught:
        sign(folder)
    assert caught.value.exit_code == case.code
    assert contents(folder) == before


@pytest.mark.parametrize(("first", "second"), [("notes.txt", "NOTES.txt"), ("caf\u00e9", "cafe\u0301")])
def test_names_that_are_one_on_some_systems(unsigned: Path, first: str, second: str) -> None:
    (unsigned / first).touch()
    (unsigned / second).touch()
    with pytest.raises(LayoutError, match="one file on some systems"):
        sign(unsigned)


@pytest.mark.parametrize("name", [b"\xff.json", "a\u202egpj".encode(), b"a\nb", b"a\\b", b"C:x"])
def test_names_that_show_as_others(unsigned: Path, name: bytes) -> None:
    (unsigned / name.decode(errors="surrogateescape")).touch()
    with pytest.raises(FileNameError):
        sign(unsigned)


def test_links_and_special_files(unsigned: Path) -> None:
    (unsigned / "link").symlink_to("config.json")
    with pytest.raises(LayoutError, match="symbolic link"):
        sign(unsigned)
    (unsigned / "link").unlink()
    (unsigned / ".github").mkdir()
    (unsigned / ".github" / "evil.py").touch()
    with pytest.raises(LayoutError, match="Git"):
        sign(unsigned)


def key_file(path: Path, *, passphrase: str | None = None, mode: int = 0o600) -> Path:
    path.write_bytes(fixed_key(1).to_pem(None if passphrase is None else passphrase.encode()))
    path.chmod(mode)
    return path


def passphrase_file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_40_a_key_that_others_can_read(unsigned: Path, tmp_path: Path, mode: int) -> None:
    outcome = invoke("sign", unsigned, "--key", key_file(tmp_path / "key.pem", mode=mode))
    assert outcome.code == 3
    assert "key.pem" in outcome.refusal
    assert not (unsigned / "model.sig").exists()


def test_40_passphrases(unsigned: Path, tmp_path: Path) -> None:
    key = key_file(tmp_path / "key.pem", passphrase=PASSPHRASE)
    wrong = invoke("sign", unsigned, "--key", key, "--passphrase-file", passphrase_file(tmp_path / "wrong", "other"))
    assert wrong.code == 3
    assert "passphrase" in wrong.refusal
    assert "other" not in wrong.refusal
    assert not (unsigned / "model.sig").exists()
    right = invoke("sign", unsigned, "--key", key, "--passphrase-file", passphrase_file(tmp_path / "right", PASSPHRASE))
    assert right.code == 0, right.stderr
    public = tmp_path / "key.pub"
    public.write_bytes(KEY.public_key.pem)
    assert invoke("verify", unsigned, "--key", public).code == 0


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_40_no_key(unsigned: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    outcome = invoke("sign", unsigned, "--key", path)
    assert outcome.code == 3
    assert "key.pem" in outcome.refusal

"""`memopt keygen` and `memopt key show`."""

from __future__ import annotations

import os
import pty
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from refusals import within_seconds

from cli.invoke import Outcome, command, invoke, run_command
from memopt.manifests.keys import CURVES, load_private_key, load_public_key


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("curve", CURVES)
def test_a_key_pair_is_written_and_shown(tmp_path: Path, curve: str) -> None:
    private, public = tmp_path / "release.pem", tmp_path / "release.pub"
    made = invoke("keygen", private, "--curve", curve, "--no-passphrase", "--json")
    assert made.code == 0
    assert (mode(private), mode(public)) == (0o600, 0o644)
    key = load_private_key(private, None).public_key
    assert load_public_key(public) == key
    assert made.verdict["hint"] == key.hint
    assert made.verdict["curve"] == curve
    assert made.verdict["is_encrypted"] is False
    for path, kind in ((private, "private"), (public, "public")):
        shown = invoke("key", "show", path, "--json").verdict
        assert (shown["kind"], shown["hint"], shown["curve"], shown["spki_sha256"]) == (
            kind,
            key.hint,
            curve,
            key.spki_sha256,
        )
    text = invoke("key", "show", public).stdout
    assert key.hint in text
    assert key.spki_sha256 in text
    assert curve in text


def test_no_private_bytes_are_printed(tmp_path: Path) -> None:
    private = tmp_path / "k.pem"
    outputs = [invoke("keygen", private, "--no-passphrase"), invoke("key", "show", private)]
    secret = private.read_text().split("\n")[1][:40]
    for outcome in outputs:
        assert outcome.code == 0
        assert secret not in outcome.stdout + outcome.stderr


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        assert invoke("keygen", tmp_path / "k.pem", "--no-passphrase").code == 0
    finally:
        os.umask(previous)
    assert mode(tmp_path / "k.pem") == 0o600


@pytest.mark.parametrize("existing", ["k.pem", "k.pub"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_nothing_is_overwritten(tmp_path: Path, existing: str, kind: str) -> None:
    path = tmp_path / existing
    path.write_bytes(b"precious") if kind == "file" else path.symlink_to("nowhere")
    outcome = invoke("keygen", tmp_path / "k.pem", "--no-passphrase")
    assert outcome.code == 2
    assert existing in outcome.refusal
    assert "never overwritten" in outcome.refusal
    assert [entry.name for entry in tmp_path.iterdir()] == [existing]
    assert kind == "dangling link" or path.read_bytes() == b"precious"


def test_the_public_keys_name(tmp_path: Path) -> None:
    assert invoke("keygen", tmp_path / "plain", "--no-passphrase").code == 0
    assert (tmp_path / "plain.pub").exists()
    assert invoke("keygen", tmp_path / "x.pub", "--no-passphrase").code == 2


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    outcome = invoke("keygen", tmp_path / "none" / "k.pem", "--no-passphrase")
    assert outcome.code == 7
    assert "cannot create" in outcome.refusal


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert invoke("keygen", tmp_path / "k.pem", "--no-passphrase").code == 7
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with a passphrase that is not ASCII."""
    path = tmp_path / "secret"
    path.write_bytes("pässwörd\n".encode())
    return path


def encrypted(tmp_path: Path, secret: Path) -> Path:
    private = tmp_path / "k.pem"
    assert invoke("keygen", private, "--passphrase-file", secret).code == 0
    assert b"ENCRYPTED" in private.read_bytes()
    return private


def test_a_passphrase_from_a_file_or_a_variable(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = encrypted(tmp_path, secret)
    assert load_private_key(private, "pässwörd".encode())
    monkeypatch.setenv("KEY_PASSPHRASE", "pässwörd")
    assert invoke("key", "show", private, "--passphrase-env", "KEY_PASSPHRASE").code == 0
    assert invoke("key", "show", private, "--passphrase-file", secret).code == 0
    secret.write_bytes("pässwörd\r\n".encode())
    assert invoke("key", "show", private, "--passphrase-file", secret).code == 0


def test_a_passphrase_from_a_pipe(tmp_path: Path, secret: Path) -> None:
    private = encrypted(tmp_path, secret)
    outcome = run_command("key", "show", private, "--passphrase-file", "/dev/stdin", input="pässwörd\n")
    assert outcome.code == 0, outcome.stderr


def refused(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.code == code, outcome.stderr
    for word in words:
        assert word in outcome.refusal


def test_passphrases_that_are_wrong(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = encrypted(tmp_path, secret)
    monkeypatch.setenv("WRONG", "hunter2-very-wrong")
    wrong = invoke("key", "show", private, "--passphrase-env", "WRONG")
    refused(wrong, 3, "wrong passphrase", "k.pem")
    assert "hunter2" not in wrong.stderr
    refused(run_command("key", "show", private, input=""), 3, "no passphrase is given", "--passphrase-file")
    refused(invoke("key", "show", private, "--passphrase-env", "UNSET_XYZ"), 2, "UNSET_XYZ")
    both = ("--passphrase-env", "WRONG", "--passphrase-file", secret)
    refused(invoke("key", "show", private, *both), 2, "exclude")
    refused(invoke("keygen", tmp_path / "n.pem", "--no-passphrase", *both[:2]), 2, "excludes")
    refused(invoke("key", "show", private, "--passphrase-file", tmp_path / "none"), 7, "passphrase file")
    secret.write_bytes(b"\n")
    refused(invoke("keygen", tmp_path / "n.pem", "--passphrase-file", secret), 3, "0 bytes")
    secret.write_bytes(b"x" * 5000)
    refused(invoke("keygen", tmp_path / "n.pem", "--passphrase-file", secret), 3, "no passphrase")
    assert not (tmp_path / "n.pem").exists()


def test_without_a_terminal_a_passphrase_must_be_decided(tmp_path: Path) -> None:
    refused(run_command("keygen", tmp_path / "k.pem", input=""), 2, "no terminal", "--no-passphrase")
    assert list(tmp_path.iterdir()) == []


def at_a_terminal(arguments: list[str], answers: list[str]) -> tuple[int, str]:
    """Run the command with a terminal and type each answer when it prompts; exit code, and all that was shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(arguments[0], arguments)
    shown, since_answer = b"", b""
    try:
        with within_seconds(60):
            while True:
                part = os.read(terminal, 1024)
                shown, since_answer = shown + part, since_answer + part
                # Only after a new prompt: what is typed before it is thrown away with the echo.
                if since_answer.rstrip().endswith(b":") and answers:
                    since_answer = b""
                    os.write(terminal, answers.pop(0).encode() + b"\n")
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
    except OSError:
        pass
    finally:
        os.close(terminal)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), shown.decode()


def test_the_prompt_asks_twice_and_shows_nothing(tmp_path: Path) -> None:
    private = tmp_path / "k.pem"
    code, shown = at_a_terminal(command("keygen", private), ["geheim", "geheim"])
    assert code == 0, shown
    assert "geheim" not in shown
    assert load_private_key(private, b"geheim")
    code, shown = at_a_terminal(command("key", "show", private), ["geheim"])
    assert code == 0, shown
    assert "geheim" not in shown
    code, shown = at_a_terminal(command("key", "show", private), ["falsch"])
    assert code == 3, shown


def test_an_empty_answer_leaves_the_key_in_the_clear(tmp_path: Path) -> None:
    code, shown = at_a_terminal(command("keygen", tmp_path / "k.pem"), ["", ""])
    assert code == 0, shown
    assert "NOT encrypted" in shown
    assert load_private_key(tmp_path / "k.pem", None)


def test_open_modes_and_files_that_are_no_keys(tmp_path: Path) -> None:
    private = tmp_path / "k.pem"
    assert invoke("keygen", private, "--no-passphrase").code == 0
    private.chmod(0o644)
    refused(invoke("key", "show", private), 3, "0644", "chmod 600")
    assert invoke("key", "show", private, "--allow-open-mode").code == 0
    private.write_bytes(b"junk")
    refused(invoke("key", "show", private), 3, "not PEM")
    refused(invoke("key", "show", tmp_path / "none"), 3, "no such key file")
    refused(invoke("key", "show", tmp_path), 3, "not a regular file")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
    private.chmod(0o600)
    refused(invoke("key", "show", private), 9, "Ed25519")

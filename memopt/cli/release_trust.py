"""Whether a release that is read must verify first: --policy or --verify-key, both optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.cli.output import echo_quietly
from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.manifests.policy import TrustPolicy

Function = TypeVar("Function", bound=Callable[..., Any])


def release_trust_options(function: Function) -> Function:
    """--policy and --verify-key, as parameters `policy` and `verify_key`."""
    decorators = [
        click.option(
            "--policy", metavar="FILE", default=None, help="Refuse RELEASE unless this trust policy accepts it."
        ),
        click.option(
            "--verify-key", metavar="FILE", default=None, help="Refuse RELEASE unless this public key (PEM) signed it."
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def load_release_trust(policy: str | None, verify_key: str | None) -> TrustPolicy | None:
    """The policy that the options name; None without any. UsageError for both."""
    if policy is None and verify_key is None:
        return None
    if policy is not None and verify_key is not None:
        raise UsageError("--policy and --verify-key exclude each other", remedy="give one of them")
    from memopt.cli.trust_options import load_trust

    return load_trust(policy, verify_key)


def say_unverified(release: str, root_digest: str | None) -> None:
    """Say on standard error that nobody vouched for `release`, if nobody did."""
    if root_digest is None:
        unchecked = f"note: the signature of {release} was not checked (--policy or --verify-key does)"
        echo_quietly(f"{unchecked}; its digests match its ledger", err=True)

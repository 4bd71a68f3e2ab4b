"""Whom a command trusts: --policy trust.json or --key pub.pem, one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.manifests.policy import TrustPolicy

Function = TypeVar("Function", bound=Callable[..., Any])

jobs_option = click.option(
    "--jobs", type=click.IntRange(1, 1024), default=None, help="Threads that read and hash (default: one a core)."
)


def trust_options(function: Function) -> Function:
    """--policy and --key, as parameters `policy` and `key`."""
    decorators = [
        click.option("--policy", metavar="FILE", default=None, help="The trust policy (docs/trust-policy.md)."),
        click.option("--key", metavar="FILE", default=None, help="Trust this public key (PEM) alone, for any release."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def load_trust(policy: str | None, key: str | None) -> TrustPolicy:
    """The policy that the options name. UsageError unless there is exactly one: unsigned is never fine."""
    if (policy is None) == (key is None):
        fault = "no policy and no key: nobody is trusted" if policy is None else "--policy and --key exclude each other"
        raise UsageError(fault, remedy="give --policy trust.json, or --key with the publisher's public key")
    from memopt.manifests.policy import load_policy, policy_for_key

    if policy is not None:
        return load_policy(policy)
    from memopt.manifests.keys import load_public_key

    return policy_for_key(load_public_key(str(key)))

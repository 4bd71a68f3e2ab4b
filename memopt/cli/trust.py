"""Whom a command trusts: --policy trust.json or --key pub.pem, exactly one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memopt.errors import UsageError

if TYPE_CHECKING:
    from memopt.manifests.policy import TrustPolicy

Function = TypeVar("Function", bound=Callable[..., Any])


def trust_options(function: Function) -> Function:
    """--policy and --key, as parameters `policy` and `key`."""
    decorators = [
        click.option(
            "--policy", metavar="TRUST.json", type=click.Path(), default=None, help="Who may sign what, and what not."
        ),
        click.option(
            "--key",
            metavar="PUB.pem",
            type=click.Path(),
            default=None,
            help="Trust this public key alone, for anything.",
        ),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def chosen_policy(policy: str | None, key: str | None) -> TrustPolicy:
    """The policy that the options name. Raises UsageError unless exactly one is given, and as the files' parsers."""
    if policy is not None and key is not None:
        raise UsageError("--policy and --key exclude each other", remedy="put the key into the policy")
    if policy is not None:
        from memopt.manifests.policy import load_policy

        return load_policy(policy)
    if key is not None:
        from memopt.manifests.keys import load_public_key
        from memopt.manifests.policy import policy_for_key

        return policy_for_key(load_public_key(key))
    raise UsageError("nobody is trusted: no policy and no key", remedy="give --policy trust.json, or --key release.pub")

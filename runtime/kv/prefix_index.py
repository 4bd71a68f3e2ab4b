"""Which full pages hold the keys and values of which tokens, so that equal prompts compute their beginning once.

A page is found by the digest of what stands before it and its own tokens, and is used only if **the tokens themselves
are equal**: a collision of digests, found by accident or on purpose, is a miss and nothing else. (vLLM's first index
trusted Python's hash of the tokens, CVE-2025-25183.)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt.errors import UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.kv.page_manager import PageManager

_DIGEST_BYTES = 32
# array type of a 64-bit signed integer: a token's number as it is hashed and compared.
_TOKEN_TYPE = "q"


@dataclass(eq=False, slots=True)
class _Node:
    """A page in the index; `parent` is None for the first page of a prompt. Compared by identity."""

    digest: bytes
    salt: bytes
    parent: _Node | None
    tokens: bytes
    held: HeldPage
    children: set[_Node] = field(default_factory=set)


@dataclass(slots=True)
class PrefixCounts:
    """Counted since the index began. `num_lost_pages`: entries whose page was freed or given away, a fault."""

    num_lookups: int = 0
    num_looked_up_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0
    num_lost_pages: int = 0


def prefix_namespace(release_digest: str, kv_format: str, scales_digest: bytes = b"") -> bytes:
    """What must be equal for two caches to hold the same bytes: the release, the KV format and its scales."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"memopt-prefix")
    for part in (release_digest.encode(), kv_format.encode(), scales_digest):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


class PrefixIndex:
    """Full pages by their tokens, under one namespace (`prefix_namespace`); it is a holder of each of its pages.

    `salt` keeps tenants apart: none finds another's pages, nor learns from the time of an answer what another asked.
    A page leaves when it is the least lately used, nothing in the index follows it, and only the index holds it; when
    `forget` names it or a page before it; never while a request holds it.
    """

    def __init__(self, namespace: bytes, manager: PageManager) -> None:
        if not 0 < len(namespace) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise UsageError(f"a namespace of {len(namespace)} bytes", remedy="use prefix_namespace()")
        self._namespace = namespace
        self._manager = manager
        # Least lately used first, and a page's followers before the page.
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._of_page: dict[int, _Node] = {}
        self._lost: list[_Node] = []
        self.counts = PrefixCounts()

    @property
    def num_pages(self) -> int:
        """Pages that the index holds."""
        return len(self._nodes)

    @property
    def held_pages(self) -> Iterator[HeldPage]:
        """Every page that the index holds, for `PageManager.check`."""
        return (node.held for node in self._nodes.values())

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> list[HeldPage]:
        """The pages of the longest known beginning of a prompt; the caller becomes a holder of each.

        At least one token is left over, because the last one's row is computed for its logits. What the caller does
        not use it releases; it never writes to one of these pages. A page that was given to somebody else behind the
        index's back is a miss, and so is what follows it (`take_lost`).
        """
        nodes: list[_Node] = []
        for node in self._walk(tokens, salt, max_pages=(len(tokens) - 1) // PAGE_TOKENS if tokens else 0):
            if not self._manager.can_share(node.held):
                self._lost.append(node)
                break
            self._manager.share(node.held)
            nodes.append(node)
        for node in reversed(nodes):
            self._nodes.move_to_end(node.digest)
        self.counts.num_lookups += 1
        self.counts.num_looked_up_tokens += len(tokens)
        self.counts.num_hit_tokens += len(nodes) * PAGE_TOKENS
        return [node.held for node in nodes]

    def insert(self, tokens: Sequence[int], pages: Sequence[HeldPage], salt: bytes = b"") -> int:
        """Keeps the full pages of `tokens`, whose keys and values `pages` hold in order; returns how many are new.

        The caller holds the pages, its steps have finished and were clean. It passes **prompt tokens only**: generated
        ones were computed in another form, so a later prompt with the same tokens would get other bits. Where the
        index has a page for these tokens already it keeps its own, and the caller's stays the caller's: nobody's
        table is rewritten. Raises UsageError when there are fewer pages than full ones.
        """
        num_full = len(tokens) // PAGE_TOKENS
        if len(pages) < num_full:
            raise UsageError(f"{len(tokens)} tokens fill {num_full} pages of {PAGE_TOKENS}, {len(pages)} are given")
        path = list(self._walk(tokens, salt, max_pages=num_full))
        num_known = len(path)
        parent = path[-1] if path else None
        for index in range(num_known, num_full):
            page_tokens = _page_tokens(tokens, index)
            digest = self._digest(salt, parent, page_tokens)
            # Another page with this digest, or this page under other tokens: what follows could not be told apart.
            is_ambiguous = digest in self._nodes or pages[index].page in self._of_page
            # Quarantined because another's table led to it: its request may finish, but hands it to nobody.
            if is_ambiguous or not self._manager.can_share(pages[index]):
                break
            self._manager.share(pages[index])
            node = _Node(digest, salt, parent, page_tokens, pages[index])
            if parent is not None:
                parent.children.add(node)
            self._nodes[digest] = node
            self._of_page[node.held.page] = node
            path.append(node)
            parent = node
        for node in reversed(path):
            self._nodes.move_to_end(node.digest)
        return len(path) - num_known

    def evict(self, num_pages: int, step: int) -> int:
        """Gives up to `num_pages` pages back that only the index holds; returns how many. They are fenced by `step`.

        Entries whose page is quarantined, or somebody else's by now (`take_lost`), go too, and do not count: that frees
        nothing.
        """
        num_evicted = num_passed_over = 0
        # Those in use, and those before one in use, go to the end, until there are no others. One round would not do: a
        # call that ended early may have left a page before its followers.
        while num_evicted < num_pages and num_passed_over < len(self._nodes):
            node = next(iter(self._nodes.values()))
            is_lost = not self._manager.is_held(node.held)
            if node.children or (not is_lost and self._manager.num_holders(node.held.page) > 1):
                self._nodes.move_to_end(node.digest)
                num_passed_over += 1
                continue
            num_passed_over = 0
            is_freed = self._manager.can_share(node.held)
            self._remove(node, step)
            num_evicted += is_freed
            if is_lost:
                self._lost.append(node)
        self.counts.num_evicted_pages += num_evicted
        return num_evicted

    def take_lost(self, step: int) -> tuple[HeldPage, ...]:
        """The pages of entries that `match` or `evict` found freed, or somebody else's, since the last call.

        The entries, and what follows them, are taken out.
        """
        lost, self._lost = self._lost, []
        for node in lost:
            if self._nodes.get(node.digest) is node:
                self._remove_with_followers(node, step)
        self.counts.num_lost_pages += len(lost)
        return tuple(node.held for node in lost)

    def forget(self, pages: Iterable[int], step: int) -> int:
        """Takes out these pages, whatever follows them, whoever else holds them; returns how many were taken out.

        For pages of a request that was aborted or flagged, and for quarantined ones.
        """
        num_removed = 0
        for page in pages:
            node = self._of_page.get(page)
            if node is not None:
                num_removed += self._remove_with_followers(node, step)
        return num_removed

    def clear(self, step: int) -> None:
        """Takes everything out."""
        self.forget(list(self._of_page), step)

    def _walk(self, tokens: Sequence[int], salt: bytes, *, max_pages: int) -> Iterator[_Node]:
        parent: _Node | None = None
        for index in range(max_pages):
            page_tokens = _page_tokens(tokens, index)
            node = self._nodes.get(self._digest(salt, parent, page_tokens))
            if node is None or (node.salt, node.tokens) != (salt, page_tokens) or node.parent is not parent:
                return
            yield node
            parent = node

    def _digest(self, salt: bytes, parent: _Node | None, page_tokens: bytes) -> bytes:
        """Of the namespace, the tenant, all that stands before, and the page's tokens."""
        state = hashlib.blake2b(page_tokens, digest_size=_DIGEST_BYTES, key=self._namespace)
        if parent is not None:
            state.update(b"follows" + parent.digest)
        else:
            state.update(b"begins" + salt)
        return state.digest()

    def _remove_with_followers(self, node: _Node, step: int) -> int:
        subtree = [node]
        for member in subtree:
            subtree.extend(member.children)
        for member in reversed(subtree):
            self._remove(member, step)
        return len(subtree)

    def _remove(self, node: _Node, step: int) -> None:
        del self._nodes[node.digest]
        del self._of_page[node.held.page]
        if node.parent is not None:
            node.parent.children.discard(node)
        # A page whose count was spoiled is not this index's to free.
        self._manager.release_own((node.held,), step)


def _page_tokens(tokens: Sequence[int], index: int) -> bytes:
    return array(_TOKEN_TYPE, tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]).tobytes()

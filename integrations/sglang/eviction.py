"""An eviction policy of `pc.cache` for SGLang's radix tree.

SGLang's own policies only return the priority of a single leaf, so they know nothing about requests and chains. Here
the tree's core notifies the policy of pages that are found, filled and released, and asks it which pages to evict. If
the last pages of a leaf are enough, only these are evicted.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...cache.policies import make_policy
from ...cache.table import Ids
from ..hints import read_or_warn
from .api import (
    CORE,
    PREFIX,
    ComponentType,
    EvictDeviceNextNodeResult,
    UnifiedRadixCache,
    UnifiedTreeCore,
    announce,
    logger,
    with_lru,
)
from .pages import PageState


class PolicyTreeCore(UnifiedTreeCore):
    """SGLang's own tree core in Python, with a policy in place of its heap of leaves.

    Locks show which pages a request holds. A request finds pages when it is admitted. It fills pages when its prompt or
    a chunk has been computed. It releases all of them at its end. Evicting a page also evicts the pages after it.

    Attributes:
        asked: Number of tokens that the current eviction must free.
        checkpointing: Whether a request that continues is moving its lock to a longer path.
        pages: The pages as the policy sees them.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        if set(components) != {ComponentType.FULL}:
            raise ValueError(f"{params.eviction_policy}: got {len(components)} components, needs full attention only")
        if params.eviction_policy_config:
            raise ValueError(f"{params.eviction_policy}: got eviction_policy_config, needs none")
        self.policy_name = params.eviction_policy.lower().removeprefix(PREFIX)
        slots = getattr(params.token_to_kv_pool_allocator, "size", None)
        if not isinstance(slots, int):
            raise ValueError(f"{params.eviction_policy}: got an allocator without a size, needs SGLang's own")
        self._num_pages = -(-slots // params.page_size) + 1
        self.asked = 0
        self.checkpointing = False
        super().__init__(dataclasses.replace(params, eviction_policy="lru", eviction_policy_config=None), components)

    def reset(self) -> None:
        """Reset the tree, with a new policy."""
        super().reset()
        self.pages = PageState(self._num_pages, self.page_size, make_policy(self.policy_name))
        self._node_of = np.full(self._num_pages, -1)  # node id of each page
        self._unlocked: dict[int, Any] = {}  # nodes without a lock that the policy does not know as released
        self._unreported: list[Any] = []  # nodes that requests locked, not yet reported to the policy
        self._leaves: list[Any] = []  # chosen leaves, deepest last
        self._most = 0  # the number of tokens after which the current eviction ends
        self.root_node.pc_pages = np.zeros(0, np.int32)
        self.root_node.pc_waits = False  # whether the policy may evict the node: the last request has released it

    def set_hicache_enabled(self) -> None:
        """Raise NotImplementedError: the policy could not follow pages that leave the device."""
        reason = "a host pool (hierarchical cache, retraction backup in host_pool) is not supported"
        raise NotImplementedError(f"{PREFIX}{self.policy_name}: {reason}")

    def _add_new_node(self, parent: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a node to SGLang's tree and its pages to the policy's view. No request holds the node yet."""
        node = super()._add_new_node(parent, key, *args, **kwargs)
        raw = np.frombuffer(node.key.raw_token_ids(), np.int64)
        # With EAGLE, a page's last key is a pair, so the token after the page belongs to its identity.
        tokens = sliding_window_view(raw, self.page_size + node.key.is_bigram)[:: self.page_size]
        seed = zlib.crc32(repr((key.extra_key, key.cache_salt)).encode())
        before = None if parent is self.root_node else parent.pc_pages.item(-1)
        node.pc_pages = self.pages.fill(tokens, before, seed)
        node.pc_waits = False
        self._node_of[node.pc_pages] = node.id
        self._unlocked[node.id] = node
        return node

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        new_node, action = super()._split_node(key, child, split_len)
        count = split_len // self.page_size
        new_node.pc_pages, child.pc_pages = child.pc_pages[:count], child.pc_pages[count:]
        new_node.pc_waits = child.pc_waits
        self._node_of[new_node.pc_pages] = new_node.id
        if child.id in self._unlocked:
            self._unlocked[new_node.id] = new_node
        return new_node, action

    def _remove_leaf_from_parent(self, node: Any) -> None:
        super()._remove_leaf_from_parent(node)
        ids = node.pc_pages
        self.pages.empty(ids, ids if node.pc_waits else ids[:0])
        self._node_of[ids] = -1
        self._unlocked.pop(node.id, None)

    def inc_lock_ref(self, node_id: Any, *args: Any, **kwargs: Any) -> Any:
        """Record that a request holds the pages up to a node."""
        result = super().inc_lock_ref(node_id, *args, **kwargs)
        node = self.node_by_id(node_id)
        path = self._path(node)
        if path:
            self.pages.hold(_pages(path), 1, sum(len(each.pc_pages) for each in path if _locks(each) == 1))
            for each in path:
                self._unlocked.pop(each.id, None)
            if not self.checkpointing:
                self._unreported.append(node)
            elif any(each.pc_waits for each in path):  # filled by another request, which has ended
                self._report_path([each for each in path if each.pc_waits])
        return result

    def dec_lock_ref(self, node_id: Any, *args: Any, **kwargs: Any) -> Any:
        """Record that a request releases the pages up to a node."""
        node = self.node_by_id(node_id)
        path = self._path(node)
        result = super().dec_lock_ref(node_id, *args, **kwargs)
        if path:
            last = [each for each in path if _locks(each) == 0]
            self.pages.hold(_pages(path), -1, -sum(len(each.pc_pages) for each in last))
            if self.checkpointing:  # the request continues with a longer lock
                self._unlocked |= {each.id: each for each in last}
            elif node in self._unreported:  # a brief lock, such as the scheduler's when it examines a request
                self._unreported.remove(node)
                self._unlocked |= {each.id: each for each in last if not each.pc_waits}
            elif last:
                self._release(last)
        return result

    def _report_path(self, path: list[Any]) -> None:
        """Notify the policy that a request has found the nodes of a path."""
        waiting = sum(len(each.pc_pages) for each in path if each.pc_waits)
        for each in path:
            each.pc_waits = False
        self.pages.hit(_pages(path), waiting)

    def report_hit(self, node_id: Any) -> None:
        """Notify the policy that a request has found the path to a node.

        The cache calls this before the request fills the pages after that node.
        """
        node = self.node_by_id(node_id)
        if node in self._unreported:
            self._unreported.remove(node)
            self._report_path(self._path(node))

    def _release(self, nodes: list[Any]) -> None:
        """Notify the policy that no request holds these nodes, so that it may evict them."""
        for node in nodes:
            node.pc_waits = True
            self._unlocked.pop(node.id, None)
        self.pages.release(_pages(nodes))

    def _path(self, node: Any) -> list[Any]:
        """Return the nodes of the path from below the root to a node."""
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def evict_device_start(self, component_type: Any, request_cnt: int) -> None:
        """Prepare an eviction of `self.asked` tokens. It stops at `request_cnt` tokens, which may be more."""
        self._leaves, self._most = [], request_cnt
        for node in self._unreported:
            self._report_path(self._path(node))
        self._unreported = []
        for node in [node for node in self._unlocked.values() if _locks(node) == 0]:
            self._release([node])

    def evict_device_next_node(self, component_type: Any, tracker: dict[Any, int]) -> Any:
        """Return the next leaf to evict, or None if there is none or enough tokens have been evicted."""
        result = EvictDeviceNextNodeResult()
        if tracker[ComponentType.FULL] >= self._most:
            return result
        while self._leaves or self.pages.num_waiting:
            if not self._leaves:
                left = max(self.asked - tracker[ComponentType.FULL], 1)
                self._choose(-(-left // self.page_size))
                continue
            node = self._leaves.pop()
            if self._is_device_leaf(node):
                result.node_id, result.made_progress = node.id, True
                break
            self.pages.refill(node.pc_pages)  # a lock without a notification holds the node
            self._unlocked[node.id] = node
        return result

    def evict_device_end(self, component_type: Any) -> None:
        """Return to the policy the chosen leaves that were not evicted. A later eviction may choose them again."""
        for node in reversed(self._leaves):
            self.pages.refill(node.pc_pages)
            self._release([node])
        self._leaves = []

    def _choose(self, count: int) -> None:
        """Ask the policy for `count` pages to evict, and set `_leaves` to the nodes that hold them, deepest last.

        A node that holds other pages too is split before its first victim.
        """
        chosen = self.pages.victims(count)
        numbers = self._node_of[chosen]
        order = numbers.argsort(kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        firsts = np.minimum.reduceat(self.pages.prefix_length[chosen[order]], starts)
        nodes = map(self.node_by_id, numbers[starts].tolist())
        cuts = list(zip(firsts.tolist(), nodes, strict=True))
        gone: dict[int, Any] = {}
        for first, node in sorted(cuts, key=lambda cut: -cut[0]):  # from the end: a node may be split twice
            place = first - self.pages.prefix_length.item(node.pc_pages.item(0))
            if place:
                self._split_node(node.key, node, place * self.page_size)
            stack = [node]
            while stack:
                each = stack.pop()
                gone[each.id] = each
                stack.extend(each.children.values())
        length = self.pages.prefix_length
        leaves = sorted(gone.values(), key=lambda node: length.item(node.pc_pages.item(0)))  # deeper nodes come last
        taken = np.zeros(self._num_pages, np.bool_)
        taken[chosen] = True
        for node in leaves:
            behind = node.pc_pages[~taken[node.pc_pages]]
            if node.pc_waits and len(behind):
                self.pages.withdraw(behind)
            node.pc_waits = False
        self._leaves = leaves

    def pass_hints(self, req: Any, finished: bool, several_ranks: bool) -> None:
        """Pass a request's hints to the policy, and at its end the number of tokens that it generated.

        With several ranks, ranges with a `ttl` are ignored. Ranks read their own clocks, so they would choose
        different victims.
        """
        hint, _ = read_or_warn(req, req.rid, logger)
        if hint is not None:
            ids = _pages(self._path(self.node_by_id(req.lock.node)))
            ranges = [each for each in hint.ranges if each.ttl is None or not several_ranks]
            if len(ranges) < len(hint.ranges):
                logger.warning("ranges in kv_hints of request %s are ignored: ttl needs an engine of one rank", req.rid)
            for each in ranges:
                end = None if each.end is None else -(-each.end // self.page_size)
                kept = ids[each.start // self.page_size : end]
                if len(kept):
                    self.pages.hinted(kept, each.priority, each.ttl)
        if finished:
            self.pages.finished(len(req.output_ids), None if hint is None else hint.returns)


class PolicyRadixCache(UnifiedRadixCache):
    """SGLang's radix cache over a `PolicyTreeCore`, which it notifies of requests."""

    def __init__(self, params: Any) -> None:
        super().__init__(dataclasses.replace(params, tree_core_backend=CORE))
        # With attention-DP, the ranks of context parallelism are in no group of tensor parallelism.
        self.num_ranks = self.tp_world_size * params.pp_size * params.attn_cp_size
        announce(f"eviction by {params.eviction_policy} ({type(self.tree_core.pages.policy).__name__})")

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the pages that a request has computed into the tree, locked by the request."""
        core = self.tree_core
        if req.lock is not None:
            core.report_hit(req.lock.node)
        core.checkpointing = True
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            core.checkpointing = False
        if req.lock is not None:
            core.pass_hints(req, req.finished(), self.num_ranks > 1)

    def _evict(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        self.tree_core.asked = params.num_tokens
        return super()._evict(params, *args, **kwargs)


def _pages(nodes: list[Any]) -> Ids:
    """Return the pages of nodes, in order."""
    if len(nodes) == 1:
        return nodes[0].pc_pages  # type: ignore[no-any-return]
    return np.concatenate([node.pc_pages for node in nodes]) if nodes else np.zeros(0, np.int32)


def _locks(node: Any) -> int:
    """Return how many locks SGLang holds on a node."""
    return int(node.component_data[ComponentType.FULL].lock_ref)


def make_cache(context: Any, sglangs: Any) -> Any:
    """Return an engine's radix cache: a `PolicyRadixCache`, or SGLang's own for `pc_lru` and SGLang's policies.

    Args:
        context: SGLang's arguments of a cache.
        sglangs: The function that makes SGLang's own cache.
    """
    from .api import create_unified_radix_cache, get_memory

    params = context.params
    name = params.eviction_policy.lower()
    if not name.startswith(PREFIX) or context.disable_radix_cache:
        return sglangs(context)
    if name == f"{PREFIX}lru":
        announce("eviction by pc_lru (SGLang's own lru, which evicts in the same order)")
        return sglangs(with_lru(context))
    memory = get_memory()
    given = [
        option
        for option in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
        if getattr(memory, option, False)
    ]
    given += ["a model with sliding windows"] if context.is_hybrid_swa else []
    given += ["a model with recurrent states"] if context.is_hybrid_ssm else []
    given += ["enable_hierarchical_cache"] if context.enable_hierarchical_cache else []
    given += ["enable_session_radix_cache"] if params.enable_session_radix_cache else []
    if given:
        raise ValueError(f"{name}: got {', '.join(given)}, needs an engine without them")
    return create_unified_radix_cache(context, cache_class=PolicyRadixCache)

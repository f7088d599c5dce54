"""Copy-on-write inside one step: what is pending, what is pinned, and what a change of mind takes back."""

from __future__ import annotations

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.kv_cache_manager import KVCacheManager, PrefixMatch
from services.worker.engine.request import Request, RequestGroup, RequestState, fresh_choices
from tests.helpers.engine import make_request, prompt


def make_manager(*, num_blocks: int = 16) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, config=EngineConfig(model_version="m"))


def make_choices(kv: KVCacheManager, *, n: int = 1, length: int = 8) -> list[Request]:
    """Waiting choices of one request."""
    source = make_request("a", prompt(length), n=n)
    group = RequestGroup(source, root=kv.root_of(adapter_digest=b"", cache_salt=source.cache_salt))
    for index, choice in enumerate(fresh_choices(n)):
        group.members.append(Request(group, choice, sequence=index, arrival=0.0, eos_token_ids=frozenset()))
    return group.members


def warm(kv: KVCacheManager) -> list[int]:
    """Cache an eight-token prompt; returns its two blocks."""
    (request,) = make_choices(kv)
    kv.allocate(request, kv.match(request))
    request.num_computed_tokens = 8
    kv.publish(request)
    blocks = list(request.blocks)
    kv.free(request)
    return blocks


def test_the_source_of_a_copy_stays_held_until_the_step_is_over() -> None:
    kv = make_manager()
    source = warm(kv)[1]
    (request,) = make_choices(kv)
    kv.allocate(request, kv.match(request))

    assert kv.take_copies() == ((source, request.blocks[1]),)
    assert (kv.pool.ref_count(source), kv.pool.cached_count) == (1, 0)
    kv.end_step()
    assert (kv.pool.ref_count(source), kv.pool.cached_count) == (0, 1)
    kv.check_invariants([request])


def test_a_copy_of_a_copy_that_is_still_pending_is_taken_from_the_first_source() -> None:
    kv = make_manager()
    source = warm(kv)[1]
    first, second = make_choices(kv, n=2)
    kv.allocate(first, kv.match(first))
    first.state = RequestState.RUNNING
    kv.allocate(second, PrefixMatch(7, (first.blocks[0],), first.blocks[1]))

    assert set(kv.take_copies()) == {(source, first.blocks[1]), (source, second.blocks[1])}
    kv.end_step()
    kv.check_invariants([first, second])


def test_a_request_that_is_freed_before_its_copy_was_made_takes_the_copy_back() -> None:
    kv = make_manager()
    warm(kv)
    (request,) = make_choices(kv)
    kv.allocate(request, kv.match(request))

    kv.free(request)

    assert kv.take_copies() == ()
    kv.end_step()
    kv.check_invariants([])


def test_freeing_ends_the_wait_of_those_who_waited_for_its_blocks() -> None:
    kv = make_manager()
    (computing,) = make_choices(kv)
    kv.allocate(computing, kv.match(computing))
    computing.state = RequestState.RUNNING
    (waiting,) = make_choices(kv, length=9)
    kv.match(waiting)
    assert kv.must_wait(waiting)

    kv.free(computing)

    assert not kv.must_wait(waiting)


def test_a_running_request_grows_only_when_there_is_room_and_else_changes_nothing() -> None:
    kv = make_manager(num_blocks=2)
    (request,) = make_choices(kv)
    kv.allocate(request, kv.match(request))
    request.state = RequestState.RUNNING
    before = request.blocks

    assert kv.grow(request, 8)
    assert not kv.grow(request, 9)

    assert request.blocks == before
    kv.check_invariants([request])

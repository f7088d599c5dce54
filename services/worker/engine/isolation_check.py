"""Self-test of tenant isolation: tries to hit one tenant's cached block as another, and must fail.

Runs on a small pool of its own, never on live blocks. Called when an engine is built.
"""

from __future__ import annotations

import numpy as np

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.kv_cache_manager import KVCacheManager
from services.worker.engine.request import Choice, EngineRequest, Request, RequestGroup, RequestState, SamplingParams

_BLOCK_SIZE = 4


def check_isolation(config: EngineConfig) -> None:
    """Raise RuntimeError unless equal prompts hit within a (salt, adapter) and never across salts or adapters."""
    kv = KVCacheManager(num_blocks=8, block_size=_BLOCK_SIZE, config=EngineConfig(model_version=config.model_version))
    owner = _request(kv, salt=b"tenant-a", adapter=b"")
    kv.allocate(owner, kv.match(owner))
    owner.state = RequestState.RUNNING
    owner.num_computed_tokens = owner.num_tokens
    kv.publish(owner)
    expected = {
        (b"tenant-a", b""): True,
        (b"tenant-b", b""): False,
        (b"tenant-a", b"adapter"): False,
        (b"", b""): False,
    }
    for (salt, adapter), hits in expected.items():
        if bool(kv.match(_request(kv, salt=salt, adapter=adapter)).shared) is not hits:
            raise RuntimeError("the prefix cache does not keep tenants and adapters apart")


def _request(kv: KVCacheManager, *, salt: bytes, adapter: bytes) -> Request:
    prompt = np.arange(2 * _BLOCK_SIZE + 1, dtype=np.int32)
    source = EngineRequest("isolation", 0, prompt, SamplingParams(max_tokens=1, seed=0), cache_salt=salt)
    group = RequestGroup(source, root=kv.root_of(adapter_digest=adapter, cache_salt=salt))
    request = Request(group, Choice(0), sequence=0, arrival=0.0, eos_token_ids=frozenset())
    group.members.append(request)
    return request

import random
from types import SimpleNamespace

import pytest

from lit_qrl.rollout.vllm.patches import slots_of_a_step


def manager(held, kind="FullAttentionManager", size=16, count=1):
    one = type(kind, (), {})()
    one.block_size, one.req_to_blocks = size, {"r": [object()] * held}
    return SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[one] * count), empty_kv_cache_blocks="nothing new"
    )


def asked(given, computed, *args, tokens=1, **named):
    allocate = slots_of_a_step._at_once(lambda *given, **named: "vLLM's own")
    return allocate(given, SimpleNamespace(request_id="r", num_computed_tokens=computed), tokens, *args, **named)


def test_only_a_place_in_a_block_that_is_there_and_stays_open_needs_nothing():
    none = {"num_lookahead_tokens": 0}
    for computed in range(33):
        expected = "nothing new" if computed % 16 not in (0, 15) else "vLLM's own"
        assert asked(manager(3), computed, **none) == expected
    assert asked(manager(1), 17, **none) == "vLLM's own"  # its block was taken away
    assert asked(manager(3), 5, tokens=2, **none) == "vLLM's own"
    assert asked(manager(3), 5, num_lookahead_tokens=1) == "vLLM's own"
    assert asked(manager(3), 5, 0, **none) == "vLLM's own"
    assert asked(manager(3), 5, full_sequence_must_fit=True, **none) == "vLLM's own"
    assert asked(manager(3, "SlidingWindowManager"), 5, **none) == "vLLM's own"
    assert asked(manager(3, count=2), 5, **none) == "vLLM's own"


@pytest.mark.vllm
@pytest.mark.parametrize("behind", [0, 1])  # tokens that are computed and not yet known, as vLLM schedules ahead
def test_blocks_and_what_other_prompts_find_of_them_are_vllm_s(behind):
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    theirs = getattr(KVCacheManager.allocate_slots, "lit_qrl_original", KVCacheManager.allocate_slots)
    asked_of_vllm = []

    def counted(*args, **named):
        asked_of_vllm.append(args)
        return theirs(*args, **named)

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    found = []
    for allocate in (theirs, slots_of_a_step._at_once(counted)):
        cache, chance, seen = KVCacheManager(config, 512, 16, 16), random.Random(0), []
        requests = [
            Request(
                f"r{i}", [chance.randrange(50) for _ in range(5 + 9 * i)], SamplingParams(max_tokens=90), None,
                block_hasher=get_request_block_hasher(16, sha256),
            )
            for i in range(6)
        ]  # fmt: skip
        for request in requests:
            allocate(cache, request, request.num_tokens, num_lookahead_tokens=0)
            request.num_computed_tokens = request.num_tokens
        for _ in range(80):
            for request in chance.sample(requests, 4):
                while request.num_tokens < request.num_computed_tokens + 1 - behind:
                    request.append_output_token_ids(chance.randrange(50))
                new = allocate(cache, request, 1, num_lookahead_tokens=0)
                seen.append((request.request_id, new.get_block_ids(), cache.get_block_ids(request.request_id)))
                request.num_computed_tokens += 1
        for request in requests:
            request.append_output_token_ids(1)
            again = Request(
                "again", list(request.all_token_ids), SamplingParams(max_tokens=1), None,
                block_hasher=get_request_block_hasher(16, sha256),
            )  # fmt: skip
            seen.append(cache.get_computed_blocks(again)[1])
        found.append(seen)
    assert found[0] == found[1]
    assert sum(found[0][-6:]) > 6 * 32  # prompts like these are found
    assert len(asked_of_vllm) < 6 + 0.2 * 320

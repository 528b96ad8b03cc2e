"""A cache holds the same rows whether the memory of its layers is one or not."""

from __future__ import annotations

import pytest
import torch

from specbench_ss.engine.kv_cache import Cache

ROWS = 9


def written(cache: Cache, layers: int, seed: int, heads: int = 2, batch: int = 1) -> None:
    """Write rows of random numbers into every layer; the last one has one head more where `heads` is 3."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        own = 3 if heads == 3 and layer == layers - 1 else 2
        k, v = torch.randn(2, batch, own, ROWS, 4, generator=generator)
        cache.update(k, v, layer)


def kept(cache: Cache) -> list[torch.Tensor]:
    """The rows that exist, keys and values of every layer."""
    return [rows[:, :, :n].clone() for i, n in enumerate(cache.lengths) for rows in cache.memory_of(i)]


def same(one: Cache, other: Cache) -> bool:
    return one.lengths == other.lengths and all(map(torch.equal, kept(one), kept(other)))


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("rows", [[0, 2, 5], torch.tensor([1, 2, 7]), [0, 1, 2]])
@torch.inference_mode()
def test_rows_of_joined_layers_are_moved_as_those_of_others(heads: int, rows: list[int] | torch.Tensor) -> None:
    caches = [Cache(4, 12, joined=joined) for joined in (False, True)]
    for cache in caches:
        cache.grows = True
        written(cache, 4, 1, heads)
        cache.commit(2)
        cache.compact(2, rows, 0, 3)
        cache.compact(2, [1, 3], 3)
        cache.lengths = [4] * 4
        written(cache, 4, 2, heads)  # beyond the capacity: it grows
        cache.commit(5)
    assert same(*caches) and caches[0].capacity == caches[1].capacity
    assert caches[1].memory is not None and caches[1].separate == ({3} if heads == 3 else set())
    first = caches[1].memory_of(0)[0]
    assert first.data_ptr() == caches[1].memory.data_ptr(), "the layers' memory is a part of the whole"


@torch.inference_mode()
def test_a_batch_goes_on_with_some_and_memory_is_dropped_taken_again_and_zeroed() -> None:
    caches = [Cache(3, 12, joined=joined) for joined in (False, True)]
    for cache in caches:
        written(cache, 3, 1, batch=4)
        cache.commit(6)
        cache.select_sequences(torch.tensor([2, 0]))
    assert same(*caches) and kept(caches[1])[0].shape[0] == 2
    for cache in caches:
        cache.zero_()
        assert all(not rows.any() for rows in kept(cache))
        cache.free()
        assert not cache.has(0) and cache.memory is None
        written(cache, 3, 3)
        cache.commit(4)
        cache.reserve(40)
        written(cache, 3, 4)
        cache.commit(ROWS)
    assert same(*caches)


def test_keys_and_values_of_two_shapes_have_memory_of_their_own() -> None:
    cache = Cache(2, 8, joined=True)
    for layer in range(2):
        cache.update(torch.ones(1, 2, 3, 6), torch.ones(1, 2, 3, 4), layer)
    cache.commit(3)
    cache.compact(1, [1])
    assert cache.memory is None and [rows.shape[-1] for rows in kept(cache)] == [6, 4, 6, 4]


def test_a_cache_that_grows_keeps_room_in_addition_in_whole_blocks() -> None:
    cache = Cache(1, 8)
    cache.grows, cache.spare, cache.block = True, 5, 16
    cache.update(torch.ones(1, 1, 12, 2), torch.ones(1, 1, 12, 2), 0)
    assert cache.capacity == 32


def test_a_cache_doubles_up_to_the_rows_of_the_context() -> None:
    cache, sizes = Cache(1, 8), list[int]()
    for rows in (10, 17, 33, 65, 66, 101):
        cache.reserve(rows, 100)
        sizes.append(cache.capacity)
    assert sizes == [16, 32, 64, 100, 100, 101]

import torch

from services.worker.kernels.huge_pages import Arena, zeroed


def test_memory_is_zero_writable_and_begins_a_large_page() -> None:
    data = zeroed(3_000_000)

    assert data.data_ptr() % (2 << 20) == 0
    assert (len(data), int(data.count_nonzero())) == (3_000_000, 0)
    data.fill_(7)
    assert int(data.sum()) == 21_000_000


def test_runs_of_an_arena_lie_apart_and_outlive_it() -> None:
    arena = Arena()
    sizes = [1, 100, 33 << 20, 64, 4096]

    runs = [arena.take(size) for size in sizes]
    del arena

    for value, run in enumerate(runs):
        run.fill_(value + 1)
    assert [len(run) for run in runs] == sizes
    assert all(run.data_ptr() % 64 == 0 for run in runs)
    assert all(bool(torch.all(run == value + 1)) for value, run in enumerate(runs))

"""Adversarial rows, two pretended ranks, and a watch for host synchronisations."""

import threading
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LENGTHS = [1, 2, 3, 4, 5, 6, 0, 6]
RTOL = {torch.float64: 1e-9, torch.float32: 1e-3}
DTYPES = [torch.float64, torch.float32]


def rows(dtype=torch.float64, spread=0.3, huge=30.0, seed=0):
    """Return learner, sampler, mask, advantages: every length from 0 to t, one zero-variance group, one row of equal
    policies, single log-ratios of ±`huge`, and NaN or ±inf in the padding.
    """
    generator = torch.Generator().manual_seed(seed)
    b, t = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(t) < torch.tensor(LENGTHS)[:, None]
    sampler = -3 * torch.rand(b, t, generator=generator, dtype=torch.float64)
    learner = sampler + spread * torch.randn(b, t, generator=generator, dtype=torch.float64)
    learner[3] = sampler[3]
    if huge:
        learner[2, 1] = sampler[2, 1] + huge
        learner[4, 0] = sampler[4, 0] - huge
    advantages = torch.tensor([1.0, -1.0, 0.7, -0.4, 0.0, 0.0, 2.0, -0.2], dtype=torch.float64)
    # Rounded first, so that the references start from the very numbers that the functions get.
    learner, sampler, advantages = (x.to(dtype) for x in (learner, sampler, advantages))
    learner[~mask], sampler[~mask] = float("nan"), float("inf")
    return learner, sampler, mask, advantages


def listed(values, mask):
    """Return the masked values of each row as lists of Python floats (fp64)."""
    return [[float(v) for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(values, mask, strict=True)]


def log_ratios(learner, old, mask):
    """Return learner − old of each row as lists of Python floats."""
    pairs = zip(listed(learner.detach(), mask), listed(old, mask), strict=True)
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in pairs]


def spread_out(per_row, mask, fill=1.0):
    """Return "b t" in fp64 from one list (or number) per row, `fill` in the padding."""
    out = torch.full(mask.shape, fill, dtype=torch.float64)
    for i, values in enumerate(per_row):
        n = int(mask[i].sum())
        for j in range(n):
            out[i, j] = values[j] if isinstance(values, list) else values
    return out


class Ranks:
    """Runs a function once per rank, in threads, with an all-reduce that works between them."""

    def __init__(self, n):
        self.n, self.barrier, self.slots = n, threading.Barrier(n, timeout=20), [None] * n

    def reducer(self, rank):
        def all_reduce(value, op="sum"):
            self.slots[rank] = value.clone()
            self.barrier.wait()
            stacked = torch.stack([slot for slot in self.slots if slot is not None])
            result = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
            self.barrier.wait()
            return result.to(value.dtype)

        return all_reduce

    def run(self, function):
        """Return `function(rank, all_reduce)` of every rank."""
        results, errors = [None] * self.n, []

        def work(rank):
            try:
                results[rank] = function(rank, self.reducer(rank))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def on_ranks(function, *rows, **options):
    """Return `function(*rows, **options)`, which waits for no device and is the same on two ranks of half the rows."""
    with no_host_sync():
        whole = function(*rows, **options)
    wide = rows[0].dtype == torch.float64
    for part in Ranks(2).run(lambda r, f: function(*(x[r::2] for x in rows), **options, all_reduce=f)):
        torch.testing.assert_close(part, whole, rtol=1e-9 if wide else 1e-4, atol=1e-12 if wide else 1e-6)
    return whole


class _NoSync(TorchDispatchMode):
    WAITS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal.default",
        "unique",
        "bincount",
        "lift_fresh",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(wait in name for wait in self.WAITS), f"{name} waits for the device"
        if "aten.index" in name:
            indices = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            assert not any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync():
    """Fail on operators that would make the host wait for a CUDA device."""
    with _NoSync():
        yield

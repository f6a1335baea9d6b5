"""What stands for a CUDA graph where there is no GPU."""


class Repeated:
    """Does the work again when it is replayed."""

    made = 0

    def __init__(self, work, device, former=None):
        self.work, Repeated.made = work, Repeated.made + 1

    def replay(self):
        self.work()


class Wrong(Repeated):
    """Does it twice."""

    def replay(self):
        self.work()
        self.work()


def refused(work, device, former=None):
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

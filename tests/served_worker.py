"""The worker extension with the CPU kernels that vLLM lacks emulated; vLLM's server imports it in its own process."""

from tests import vllm_cpu_shim

vllm_cpu_shim.install()

from lit_qrl.rollout.vllm.worker import WorkerExtension  # noqa: E402  after the kernels are there

__all__ = ["WorkerExtension"]

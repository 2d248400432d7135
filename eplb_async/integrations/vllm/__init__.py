"""The drop-in for vLLM: its expert load balancer's NIXL communicator, on this library's agent.

Nothing here imports vllm; it is met where it is loaded already, or by :func:`install`, which vLLM calls.
"""

from eplb_async.integrations.vllm.communicator import AsyncNixlEplbCommunicator
from eplb_async.integrations.vllm.plugin import install

__all__ = ["AsyncNixlEplbCommunicator", "install"]

"""NIXL from asyncio: the agent, its regions and peers. The only package that imports NIXL."""

from eplb_async.nixl.agent import AsyncNixlAgent, Region
from eplb_async.nixl.native import Extent
from eplb_async.nixl.peers import Peer
from eplb_async.nixl.regions import Rows, Span
from eplb_async.nixl.stats import EndpointStats
from eplb_async.nixl.transfer import TransferStats

__all__ = ["AsyncNixlAgent", "EndpointStats", "Extent", "Peer", "Region", "Rows", "Span", "TransferStats"]

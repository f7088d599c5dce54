"""Typed gRPC client of a Millrace gateway (`millrace.gateway.v1`): deadlines, safe retries, streams sync and async."""

from millrace_client.aio import AsyncClient, AsyncStream
from millrace_client.client import Client, Stream
from millrace_client.errors import MillraceError
from millrace_client.retry import RetryPolicy
from millrace_client.usage import AcceleratorUse, Cost, UsageGroup, UsageQuery
from millrace_client.values import Answer, Choice, Delta, Message, Model, Options, Tool, ToolCall, Usage

__all__ = [
    "AcceleratorUse",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "Cost",
    "Delta",
    "Message",
    "MillraceError",
    "Model",
    "Options",
    "RetryPolicy",
    "Stream",
    "Tool",
    "ToolCall",
    "Usage",
    "UsageGroup",
    "UsageQuery",
]

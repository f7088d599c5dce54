"""Files and batches in OpenAI's shapes: what clients send, what they get, and the lines of a batch. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_S = 86_400


class FileUpload(msgspec.Struct):
    """The form of an upload: `file` is JSONL."""

    file: str
    purpose: Literal["batch"]


class FileObject(msgspec.Struct, frozen=True):
    """A file's facts; times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True):
    """One page, newest first."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True):
    """The file is gone."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for a batch."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines: all, those with an answer, those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True):
    """Why a whole batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """A list of them."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times are Unix seconds, null while they have not come."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    status: Status
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True):
    """One page, newest first."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of an input file."""

    custom_id: str
    method: Literal["POST"]
    url: Endpoint
    body: msgspec.Raw


class LineResponse(msgspec.Struct, frozen=True):
    """What the endpoint would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """Why a line never became a request."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None

"""The one table of limits at the edge (CONTRACT, "Limits before parsing"). Values only; both doors check against it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Each limit is the largest value that is accepted."""

    body_bytes: int = 4 * 1024 * 1024
    json_depth: int = 32
    header_bytes: int = 32 * 1024
    header_count: int = 64
    body_timeout_s: float = 30.0
    messages: int = 2_048
    stop_strings: int = 4
    stop_string_bytes: int = 256
    stop_token_ids: int = 64
    logit_bias_entries: int = 1_024
    logit_bias_value: float = 100.0
    bad_words: int = 32
    bad_word_bytes: int = 64
    choices: int = 8
    embedding_inputs: int = 256
    top_logprobs: int = 20
    metadata_entries: int = 16
    metadata_key_bytes: int = 64
    metadata_value_bytes: int = 512
    user_bytes: int = 512
    model_name_bytes: int = 256
    client_request_id_bytes: int = 128
    tools: int = 128
    schema_bytes: int = 64 * 1024
    schema_depth: int = 16
    schema_nodes: int = 512
    schema_branches: int = 32
    schema_enum: int = 512
    pattern_bytes: int = 512
    batch_file_bytes: int = 100 * 1024 * 1024
    batch_lines: int = 50_000
    batch_line_bytes: int = 1024 * 1024
    custom_id_bytes: int = 256
    file_name_bytes: int = 256
    upload_timeout_s: float = 600.0
    tenant_file_bytes: int = 2 * 1024 * 1024 * 1024
    tenant_files: int = 1_000
    unfinished_batches: int = 64
    # What a request gets that names no limit of its own.
    default_completion_tokens: int = 16
    default_chat_tokens: int = 4_096
    default_timeout_s: float = 600.0
    timeout_s: float = 3_600.0
    # Text longer than this is tokenised in a thread.
    inline_encode_bytes: int = 8 * 1024

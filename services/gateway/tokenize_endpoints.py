"""`POST /tokenize` and `/detokenize`: the ids that a request would have, and their text. Called by the HTTP door.

Nothing is admitted or billed; the model need not have room.
"""

from __future__ import annotations

from starlette.types import Send

from services.common.admission_types import KeyRecord
from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.gateway.api_types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from services.gateway.json_endpoint import send_json
from services.gateway.openai_draft import chat_draft
from services.gateway.openai_types import ChatRequest
from services.gateway.request_draft import Prompt, TextPrompt
from services.gateway.validation import Validator, check_ids


class TokenizeEndpoints:
    """Both directions, through the validator of generation."""

    def __init__(self, validator: Validator) -> None:
        self._validator = validator

    async def tokenize(self, key: KeyRecord, body: TokenizeRequest, send: Send) -> None:
        """Raises InvalidRequest, ContextLengthExceeded, ModelNotFound, NoWorker, Unsupported."""
        model = self._validator.resolve(key, body.model)
        ids = await self._validator.tokenise(model, _prompt(body), add_bos=body.add_special_tokens is not False)
        words = [model.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        answer = TokenizeAnswer(
            count=len(ids),
            max_model_len=model.card.max_model_len,
            tokens=ids.tolist(),
            token_strs=words if body.return_token_strs else None,
        )
        await send_json(send, answer)

    async def detokenize(self, key: KeyRecord, body: DetokenizeRequest, send: Send) -> None:
        """At most a context of ids. Raises InvalidRequest, ContextLengthExceeded, ModelNotFound, NoWorker."""
        model = self._validator.resolve(key, body.model)
        context = model.card.max_model_len
        if len(body.tokens) > context:
            message = f"`tokens` has {len(body.tokens)} ids; this model's context is {context} tokens."
            raise ContextLengthExceeded(message, param="tokens")
        check_ids("tokens", body.tokens, model.card.vocab_size)
        text = b"".join(map(model.tokenizer.token_bytes, body.tokens)).decode("utf-8", "replace")
        await send_json(send, DetokenizeAnswer(prompt=text))


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Exactly one of `prompt` and `messages` is required.", param="prompt")
    if body.messages is None:
        return TextPrompt(body.prompt or "")
    chat = ChatRequest(model=body.model, messages=body.messages, chat_template_kwargs=body.chat_template_kwargs)
    return chat_draft(chat).prompt

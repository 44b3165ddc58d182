"""`DELETE /v1/conversations/{id}`: the client says that no turn follows under this conversation or session id.

Separate from turns because no engine has to answer: what is kept for it is dropped, and its leases are ended in the
background. In OpenAI's API a conversation is an object with items; here it is whatever turns named by that id, so that
there is nothing that could not be found: what is not kept is deleted already.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

import orjson

from pd_router.core.errors import bad_method, unknown_path
from pd_router.core.facts import id_text
from pd_router.shell.context import Context
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder

PREFIX: Final = "/v1/conversations/"


async def end_conversation(context: Context, path: str, request: Request, responder: Responder) -> None:
    """Answer a request below `PREFIX`. `deleted` is false where the store could not be asked: what it has may stay."""
    own = [(b"x-request-id", context.request_id(request.headers).encode("latin-1", "replace"))]
    written = path.removeprefix(PREFIX)
    name = id_text(unquote_to_bytes(written))
    if not name or "/" in written:
        responder.send_error(unknown_path(path), own)
        return
    if request.method != "DELETE":
        responder.send_error(bad_method(request.method, path, "DELETE"), [(b"allow", b"DELETE"), *own])
        return
    deleted: bool = True
    if request.tenant is not None:  # nothing is kept for nobody
        ended = context.store.end((), (context.keyring.conversation(request.tenant, name),), context.now())
        deleted = ended if isinstance(ended, bool) else await ended
    body = orjson.dumps({"id": name, "object": "conversation.deleted", "deleted": deleted})
    responder.send(200, [(b"content-type", b"application/json"), *own], body)

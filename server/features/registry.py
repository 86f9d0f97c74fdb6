"""What features add to the server, a line for each. A class of fields names its hooks."""

from runtime.features.chunks.documents.prompt import in_messages
from server.features import chunks
from server.features.chunks.chat import ChunkChat, DocumentPart, ModulePart
from server.features.chunks.documents import DocumentStore
from server.features.chunks.generate import ChunkPrompts
from server.features.chunks.schemas import SchemaStore
from server.features.parts import Stores

# Packages whose modules define routes.
ROOMS = (chunks,)
# Parts of messages that are no text.
MessagePart = ModulePart | DocumentPart
# Bases of the bodies of chats and of `/generate`: the features' fields.
ChatFields = ChunkChat
GenerateFields = ChunkPrompts
# Renders turns whose contents may have parts. Raises InvalidRequest.
write_turns = in_messages


def open_stores() -> Stores:
    """Empty stores of all features."""
    return Stores((DocumentStore, SchemaStore))

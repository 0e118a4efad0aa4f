from .chat_encoder import ChatEncoder as ChatEncoder
from .chat_encoder import LeftOut as LeftOut
from .chat_template import ChatTemplate as ChatTemplate
from .chat_template import read_chat_template as read_chat_template
from .read_conversations import Conversation as Conversation
from .read_conversations import read_chats as read_chats
from .token_sequence import TokenSequence as TokenSequence
from .token_sequence import sequence_of as sequence_of

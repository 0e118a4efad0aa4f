from .chat_encoder import ChatEncoder as ChatEncoder
from .chat_start import encoder_of_run as encoder_of_run
from .chat_start import encoder_of_start as encoder_of_start
from .left_out import LeftOut as LeftOut
from .read_conversations import Conversation as Conversation
from .read_conversations import read_chats as read_chats

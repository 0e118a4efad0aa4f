from .huggingface import read_huggingface as read_huggingface
from .huggingface import write_huggingface as write_huggingface
from .tiktoken import from_vocabulary as from_vocabulary
from .tiktoken import read_gpt2 as read_gpt2
from .tiktoken import read_tiktoken as read_tiktoken
from .tiktoken import write_gpt2 as write_gpt2
from .tiktoken import write_tiktoken as write_tiktoken

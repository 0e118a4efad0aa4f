from .convert import load_gguf as load_gguf
from .convert import save_gguf as save_gguf
from .gguf_file import is_gguf as is_gguf

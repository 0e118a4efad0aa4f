from .convert import load_huggingface as load_huggingface
from .convert import save_huggingface as save_huggingface

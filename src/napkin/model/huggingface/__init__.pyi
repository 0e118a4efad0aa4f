from .adapter_files import save_adapters as save_adapters
from .convert import load_huggingface as load_huggingface
from .convert import load_huggingface_into as load_huggingface_into
from .convert import read_huggingface_config as read_huggingface_config
from .convert import save_huggingface as save_huggingface
from .folder_files import TextForm as TextForm

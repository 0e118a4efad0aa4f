from .errors import NapkinError as NapkinError

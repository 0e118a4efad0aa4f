from .preparation import Preparation as Preparation

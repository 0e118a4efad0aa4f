"""The plan of one device's step: its operators' seconds, its bytes, and what can be changed where it does not fit."""

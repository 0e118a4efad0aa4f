"""Layouts of several devices: what each costs in bytes and seconds, and the search for the best one."""

"""Plans of inference services: latency, throughput and memory, on a catalogue's devices and on this machine."""

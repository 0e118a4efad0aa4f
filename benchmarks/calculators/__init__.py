"""The accountant beside the calculators that people use: FLOPs, peak bytes, speed, and what metering costs."""

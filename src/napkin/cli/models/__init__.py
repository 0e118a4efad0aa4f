"""Commands that use a trained model: generate, chat, serve, quantize, export."""

"""The Checkpointer inside other people's training loops: Hugging Face's Trainer and Lightning's."""
